"""Keys and values as int8 in torch: the numbers of a head in one slot share a scale in bfloat16, x = scale * q.

The scale is the largest magnitude / 127, rounded up to bfloat16: so q is -127..127, and the error of a number is at
most half a scale. bfloat16 has the range of float32, so this holds for numbers of every size. For a head with an
infinity or NaN the scale is not finite and q is 0, so its products are NaN.

Letters: B batch, H KV heads, T tokens, D head_dim, C capacity. The other implementations follow this one. They may
round a tie to the other side, because they divide less exactly.
"""

import torch
from torch import Tensor

SCALE_DTYPE = torch.bfloat16


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """Floats [..., D] -> (int8 [..., D], scales bfloat16 [...])."""
    x = x.float()
    exact = x.abs().amax(dim=-1) / 127
    scales = exact.to(SCALE_DTYPE)
    scales = (scales.view(torch.int16) + (scales.float() < exact)).view(SCALE_DTYPE)  # the next larger if too small
    usable = (scales > 0) & scales.isfinite()
    return torch.where(usable[..., None], (x / scales[..., None]).round(), 0.0).to(torch.int8), scales


def write_heads(slots: Tensor, scales: Tensor | None, at: slice, x_BHTD: Tensor) -> None:
    """Puts floats into the slots `at` of keys or values [B, H, C, padded D], quantised if there are `scales`."""
    dim = x_BHTD.shape[-1]
    if scales is None:
        slots[:, :, at, :dim] = x_BHTD
    else:
        slots[:, :, at, :dim], scales[:, :, at] = quantised(x_BHTD)


def read_heads(slots: Tensor, scales: Tensor | None, at: slice, dim: int) -> Tensor:
    """The slots `at` [B, H, T, dim] of keys or values: in the stored type, or in float32 if there are `scales`."""
    stored = slots[:, :, at, :dim]
    return stored if scales is None else stored * scales[:, :, at, None].float()
