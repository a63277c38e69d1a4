"""The types that weights can have, and one error message for all other types."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from labkit.system.errors import UserError

FLOAT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPES = FLOAT_DTYPES | {"int8": torch.int8}  # int8: the layers' matrices, see `Quantization`


def dtype_of(dtype: str | torch.dtype, known: Mapping[str, torch.dtype] = DTYPES) -> torch.dtype:
    """The torch type of a type or its name. Raises UserError unless it is one of `known`."""
    name = str(dtype).removeprefix("torch.")
    if name not in known:
        raise UserError(f"unsupported dtype {name!r}; expected one of {', '.join(known)}")
    return known[name]
