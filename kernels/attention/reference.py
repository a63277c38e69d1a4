"""Reference: the unfused sequence (transposes, repeated KV heads, scores, bias, mask, softmax, context)."""

import torch
from torch import Tensor

from ..int8_cache import read_heads
from ..plain import soft_capped
from ..types import AttentionParams, Heads, LayerCache, Rows


def attention(
    queries: Tensor,
    params: AttentionParams,
    heads: Heads,
    rows: Rows,
    cache: LayerCache,
    all_seen: bool = False,
) -> Tensor:
    """Computes in the type of the queries. `all_seen`: the caller knows that no slot is hidden, so no mask is made."""
    total = cache.past + rows.tokens
    q = queries.view(rows.batch, rows.tokens, heads.query, heads.dim).transpose(1, 2)
    stored = ((cache.keys, cache.key_scales), (cache.values, cache.value_scales))
    k, v = (read_heads(*part, slice(total), heads.dim).to(queries.dtype) for part in stored)
    if heads.query > heads.kv:
        k, v = (part.repeat_interleave(heads.query // heads.kv, dim=1) for part in (k, v))
    scores = q @ k.transpose(2, 3) * params.scale
    if params.cap is not None:
        scores = soft_capped(scores, params.cap)
    if params.slopes is not None and rows.key_positions is not None:
        scores = scores + params.slopes.view(1, -1, 1, 1) * rows.key_positions[:, None, None, :total]
    hidden = None if all_seen else ~seen(rows, cache.past, params.window, causal=params.causal)[:, None]
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    if params.sinks is not None:
        sinks = params.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        probabilities = torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]
    else:
        probabilities = scores.softmax(dim=-1)
    if hidden is not None:
        probabilities = probabilities.masked_fill(hidden, 0.0)
    return (probabilities @ v).transpose(1, 2).reshape(len(queries), -1).contiguous()


def seen(rows: Rows, past: int, window: int | None, *, causal: bool = True) -> Tensor:
    """bool [B, T, past + T]: the slots that each new token sees."""
    device = rows.first.device
    slot = torch.arange(past + rows.tokens, device=device)
    own = past + torch.arange(rows.tokens, device=device)[:, None]
    mask = slot > own - (window or len(slot))
    if causal:
        mask = mask & (slot <= own)
    mask = mask & (slot >= rows.first[:, None, None])
    if rows.visible is not None:
        mask = mask & rows.visible[:, None, : len(slot)].bool()
    return mask
