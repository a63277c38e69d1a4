"""Reference: one torch op after the other."""

import torch
from torch import Tensor
from torch.nn import functional

L2_EPSILON = 1e-6  # of queries and keys, as in flash-linear-attention and transformers


def conv_step(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    seen = torch.cat([state, x[:, :, None].to(state.dtype)], -1)
    state.copy_(seen[:, :, 1:])
    out = (seen[:, :, -weight.shape[1] :].float() * weight.float()).sum(-1)
    if bias is not None:
        out = out + bias.float()
    return functional.silu(out) if silu else out


def delta_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, normed: bool
) -> tuple[Tensor, Tensor]:
    if normed:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPSILON) for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[1] // k.shape[1], dim=1) for x in (q, k))
    state = state * log_decay.exp()[:, :, None, None]
    delta = (v - torch.einsum("bhk,bhkv->bhv", k, state)) * beta[:, :, None]
    state = state + k[:, :, :, None] * delta[:, :, None]
    return torch.einsum("bhk,bhkv->bhv", q * q.shape[-1] ** -0.5, state), state
