"""Reference: torch's norm, and its SiLU."""

from torch import Tensor
from torch.nn import functional

from ..plain import normalise
from ..types import Norm


def norm_rows(x: Tensor, norm: Norm, gate: Tensor | None = None) -> Tensor:
    rows = normalise(norm, x)
    return rows if gate is None else rows * functional.silu(gate)
