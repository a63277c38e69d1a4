"""Checks of the functions that lay matrices out for the kernels, see `checks.checked`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.system.errors import UserError, UserTypeError
from labkit.system.rounding import BLOCK, round_up

from ..checks import FLOATS, ArgumentCheck, linear
from ..codes import PACKED, packed_shape
from ..types import Linear

INDICES = (torch.int64, torch.int32)


def bits(name: str, value: Any, call: ArgumentCheck) -> None:
    call.one_of(name, value, (8, 4))
    call.sizes["bits"] = value


def matrix(name: str, value: Any, call: ArgumentCheck) -> None:
    """Checks a matrix of numbers or codes, of any strides."""
    _matrix(name, value, (torch.int8,) if call.sizes["bits"] == 4 else (*FLOATS, torch.int8))
    _code_range(name, value, call.sizes["bits"])
    call.sizes |= {"outputs": value.shape[0], "inputs": value.shape[1]}
    call.device = value.device
    call.later_dtypes = (PACKED[4] if call.sizes["bits"] == 4 else value.dtype,)


def same_matrix(name: str, value: Any, call: ArgumentCheck) -> None:
    """Checks a second matrix like `matrix`; None: there is only one."""
    if value is None:
        return
    outputs, inputs = call.sizes["outputs"], call.sizes["inputs"]
    dtype = torch.int8 if call.sizes["bits"] == 4 else call.later_dtypes[0]
    _matrix(name, value, (dtype,))
    _code_range(name, value, call.sizes["bits"])
    if value.shape != (outputs, inputs):
        raise UserError(f"{name}: expected [{outputs}, {inputs}], as the first matrix is, got {list(value.shape)}")
    call.sizes["outputs"] = 2 * round_up(outputs, BLOCK // 2)


def codes(name: str, value: Any, call: ArgumentCheck) -> None:
    """Checks a matrix of codes, of any strides."""
    _matrix(name, value, (torch.int8,))
    _code_range(name, value, call.sizes["bits"])


def panels(name: str, value: Any, call: ArgumentCheck) -> None:
    """Checks the memory for a packed `matrix`; None: new memory."""
    if value is not None:
        (dtype,), sizes = call.later_dtypes, call.sizes
        call.tensor(name, value, dtype, *packed_shape(sizes["outputs"], sizes["inputs"], dtype))


def linear_of_rows(name: str, value: Any, call: ArgumentCheck) -> None:
    """Checks a matrix of layout "rows". The layout may be another for the reference, which gets it as it is."""
    if call.impl == "reference" and isinstance(value, Linear):
        return
    linear(name, value, ArgumentCheck(call.op, "reference"))
    value.require("rows", "reference")
    if value.scales is not None:
        _code_range(f"{name}.weight", value.weight, value.bits)


def linear_of_any_layout(name: str, value: Any, call: ArgumentCheck) -> None:
    impl = {"panels": "cpp", "words": "triton"}.get(getattr(value, "layout", ""), "reference")
    inner = ArgumentCheck(call.op, impl)
    inner.device = None
    linear(name, value, inner)
    call.device, call.sizes["outputs"] = inner.device, value.outputs


def rows_of_linear(name: str, value: Any, call: ArgumentCheck) -> None:
    call.tensor(name, value, INDICES, None)
    call.within(name, value, call.sizes["outputs"], "the matrix has no more rows")


def _matrix(name: str, value: Any, dtypes: Sequence[torch.dtype]) -> None:
    if not isinstance(value, Tensor):
        raise UserTypeError(f"{name}: expected a tensor, got {type(value).__name__}")
    if value.dtype not in dtypes or value.dim() != 2 or value.numel() == 0:
        types = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise UserError(f"{name}: expected {types} [outputs, inputs], got {value.dtype} {list(value.shape)}")


def _code_range(name: str, value: Tensor, bits: int) -> None:
    """Raises UserError for a code of more bits. Any int8 is a code of 8 bits."""
    if bits == 4 and not -8 <= int(value.min()) <= int(value.max()) <= 7:
        raise UserError(
            f"{name}: got codes from {int(value.min())} to {int(value.max())}, expected -8 to 7 for 4 bits; "
            "gemm.quantize(..., bits=4) makes such codes"
        )
