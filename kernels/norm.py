"""LayerNorm and RMSNorm in plain torch, shared by the references."""

from torch import Tensor
from torch.nn import functional as F

from .types import Norm


def normalise(norm: Norm, x: Tensor) -> Tensor:
    """norm(x) over the last dimension."""
    if norm.kind == "layer":
        return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)
    if norm.kind == "rms":
        return F.rms_norm(x, x.shape[-1:], norm.weight, norm.eps)
    return x
