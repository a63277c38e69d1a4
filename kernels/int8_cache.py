"""Keys and values as int8 in torch: the numbers of a head in one slot share a scale in bfloat16, x = scale * q.

The scale is the largest magnitude / 127, rounded up to bfloat16: so q is -127..127, and no number is off by more than
half a scale. bfloat16 has the range of float32, so that this holds for numbers of every size. A head that holds an
infinity or NaN has a scale that is none either and zeros, whose products are NaN.

Letters: B batch, H KV heads, T tokens, D head_dim, C capacity. The other implementations follow this one: they may
round a tie to the other side, where they divide less exactly.
"""

import torch
from torch import Tensor

SCALE_DTYPE = torch.bfloat16


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """Floats [..., D] -> (int8 [..., D], scales bfloat16 [...])."""
    x = x.float()
    wanted = x.abs().amax(dim=-1) / 127
    scales = wanted.to(SCALE_DTYPE)
    scales = (scales.view(torch.int16) + (scales.float() < wanted)).view(SCALE_DTYPE)  # the next one, where too small
    usable = (scales > 0) & scales.isfinite()
    return torch.where(usable[..., None], (x / scales[..., None]).round(), 0.0).to(torch.int8), scales


def write_heads(slots: Tensor, scales: Tensor | None, at: slice, x_BHTD: Tensor) -> None:
    """Puts floats into the slots `at` of keys or values [B, H, C, padded D], quantised where these have `scales`."""
    dim = x_BHTD.shape[-1]
    if scales is None:
        slots[:, :, at, :dim] = x_BHTD
    else:
        slots[:, :, at, :dim], scales[:, :, at] = quantised(x_BHTD)


def read_heads(slots: Tensor, scales: Tensor | None, at: slice, dim: int) -> Tensor:
    """The slots `at` [B, H, T, dim] of keys or values: as they are stored, in float32 where they have `scales`."""
    stored = slots[:, :, at, :dim]
    return stored if scales is None else stored * scales[:, :, at, None].float()
