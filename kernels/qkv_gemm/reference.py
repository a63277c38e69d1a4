"""Reference: the unfused sequence of torch ops (norm, GEMM, bias, split, head norms, rotation, two cache writes)."""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..norm import normalise
from ..types import Heads, LayerCache, QkvWeights, Rotary, Rows


def qkv_gemm(
    hidden: Tensor,
    weights: QkvWeights,
    heads: Heads,
    rotary: Rotary | None,
    rows: Rows,
    cache: LayerCache,
    residual_from_norm: bool,
    threads: int = 1,
) -> tuple[Tensor, Tensor]:
    normed = normalise(weights.norm, hidden)
    qkv = F.linear(normed, weights.proj.floats(), weights.proj.bias)
    q, k, v = (
        part.view(rows.batch, rows.tokens, -1, heads.dim)
        for part in qkv.split([heads.query * heads.dim, heads.kv * heads.dim, heads.kv * heads.dim], dim=-1)
    )
    if weights.q_norm is not None and weights.k_norm is not None:
        q = F.rms_norm(q, (heads.dim,), weights.q_norm, weights.qk_eps)
        k = F.rms_norm(k, (heads.dim,), weights.k_norm, weights.qk_eps)
    if rotary is not None:
        q, k = (rotate(part, rotary, rows.positions.view(rows.batch, rows.tokens)) for part in (q, k))
    new = slice(cache.past, cache.past + rows.tokens)
    cache.keys[:, :, new, : heads.dim] = k.transpose(1, 2)
    cache.values[:, :, new, : heads.dim] = v.transpose(1, 2)
    return q.reshape(len(hidden), -1).contiguous(), normed if residual_from_norm else hidden


def rotate(x_BTND: Tensor, rotary: Rotary, positions_BT: Tensor) -> Tensor:
    """Rotates the first 2 * cosine.shape[1] values of each head; the rest passes through."""
    dim = 2 * rotary.cosine.shape[1]
    turned, rest = x_BTND[..., :dim], x_BTND[..., dim:]
    cosine, sine = (table[positions_BT.long()].unsqueeze(2) for table in (rotary.cosine, rotary.sine))
    if rotary.interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * cosine - b * sine, b * cosine + a * sine), dim=-1).flatten(-2)
    else:
        a, b = turned.chunk(2, dim=-1)
        turned = torch.cat((a * cosine - b * sine, b * cosine + a * sine), dim=-1)
    return torch.cat((turned, rest), dim=-1)
