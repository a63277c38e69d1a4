"""The types that weights can have: one table, and one message for any other."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from labkit.system.errors import UserError

FLOAT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPES = FLOAT_DTYPES | {"int8": torch.int8}  # int8: the layers' matrices, see `Quantization`


def dtype_of(wanted: str | torch.dtype, known: Mapping[str, torch.dtype] = DTYPES) -> torch.dtype:
    """The type of this name, or this type, if it is one of `known`. Raises UserError for any other."""
    name = wanted if isinstance(wanted, str) else str(wanted).removeprefix("torch.")
    if name not in known:
        raise UserError(f"unsupported dtype {name!r}; expected one of {', '.join(known)}")
    return known[name]
