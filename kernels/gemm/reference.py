"""Reference: one matrix product and one add."""

from torch import Tensor

from ..plain import linear
from ..types import Linear


def gemm(x: Tensor, weights: Linear) -> Tensor:
    """x W^T + b with the weight in layout "rows"."""
    return linear(x, weights)
