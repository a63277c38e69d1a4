"""Reference: the unfused sequence of torch ops (norm, GEMM, bias, split, head norms, rotation, two cache writes)."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ..int8_cache import write_heads
from ..plain import linear, normalise
from ..types import Heads, LayerCache, Linear, QkvWeights, Rotary, Rows


def qkv_gemm(
    hidden: Tensor,
    weights: QkvWeights,
    heads: Heads,
    rotary: Rotary | None,
    rows: Rows,
    cache: LayerCache,
    residual_from_norm: bool = False,
    multiply: Callable[[Tensor, Linear], Tensor] = linear,
) -> tuple[Tensor, Tensor]:
    normed = normalise(weights.norm, hidden)
    qkv = multiply(normed, weights.proj)
    q, k, v = qkv.split([heads.query * heads.dim, heads.kv * heads.dim, heads.kv * heads.dim], dim=-1)
    if weights.whole_norms:
        q, k = _normed(q, weights.q_norm, weights.qk_eps), _normed(k, weights.k_norm, weights.qk_eps)
    q, k, v = (part.view(rows.batch, rows.tokens, -1, heads.dim) for part in (q, k, v))
    if not weights.whole_norms:
        q, k = _normed(q, weights.q_norm, weights.qk_eps), _normed(k, weights.k_norm, weights.qk_eps)
    if rotary is not None:
        rotary = rotary.table(weights.table)
        positions = rows.positions.view(rows.batch, rows.tokens)
        cosine, sine = (table[positions].unsqueeze(2) for table in (rotary.cosine, rotary.sine))
        q, k = (rotate(part, cosine, sine, interleaved=rotary.interleaved) for part in (q, k))
    new = slice(cache.past, cache.past + rows.tokens)
    write_heads(cache.keys, cache.key_scales, new, k.transpose(1, 2))
    write_heads(cache.values, cache.value_scales, new, v.transpose(1, 2))
    return q.reshape(len(hidden), -1).contiguous(), normed if residual_from_norm else hidden


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x if weight is None else F.rms_norm(x, weight.shape, weight, eps)


def rotate(x_BTND: Tensor, cosine: Tensor, sine: Tensor, *, interleaved: bool) -> Tensor:
    """Rotates the first 2 * cosine.shape[-1] values of each head; the others stay. Tables [B, T, 1, D/2]."""
    dim = 2 * cosine.shape[-1]
    turned, rest = x_BTND[..., :dim], x_BTND[..., dim:]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * cosine - b * sine, b * cosine + a * sine), dim=-1).flatten(-2)
    else:
        a, b = turned.chunk(2, dim=-1)
        turned = torch.cat((a * cosine - b * sine, b * cosine + a * sine), dim=-1)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned
