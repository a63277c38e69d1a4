"""Region 2 in Triton: one query per sequence over split KV, or many queries in tiles.

Both walk over the slots with a running softmax: the largest score so far, the sum, and the weighted values, which are
scaled down when a larger score comes. So scores stay in registers for any length of the context.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gpu import Launcher, dot_type, interpreted, optional, processors
from ..tiles import soft_capped, wait_for_previous
from ..tuned import Tile
from ..types import AttentionParams, Heads, LayerCache, Rows

MOST_SPLITS = 64


@triton.jit
def key_tile(base_ptr, j, d, mask, DP: tl.constexpr):
    """Keys or values [BS, DB] of the slots j, in the stored type."""
    return tl.load(base_ptr + j[:, None] * DP + d[None, :], mask=mask, other=0)


@triton.jit
def times_scales(x, scales_ptr, j, live, SCALED: tl.constexpr):
    """x [rows, BS] times the scales of the slots j, if they have scales: int8 keys and values are multiplied as codes,
    and their scales are applied to scores and probabilities.
    """
    if SCALED:
        x = x * tl.load(scales_ptr + j, mask=live, other=0.0).to(tl.float32)[None, :]
    return x


@triton.jit
def masked_scores(
    scores, j, live, seen, b, slope, key_positions_ptr, visible_ptr, stride,
    CAP: tl.constexpr, ALIBI: tl.constexpr, HOLES: tl.constexpr,
):  # fmt: skip
    """scores [rows, BS] under the cap, with the position bias, and -inf for unseen slots. `live` [BS]: slots of this
    share.
    """
    if CAP != 0.0:
        scores = soft_capped(scores, CAP)
    if ALIBI:
        places = tl.load(key_positions_ptr + b * stride + j, mask=live, other=0).to(tl.float32)
        scores += slope[:, None] * places[None, :]
    if HOLES:
        seen = seen & (tl.load(visible_ptr + b * stride + j, mask=live, other=0) != 0)[None, :]
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def softmax_step(scores, largest, total):
    """One step of the running softmax of scores [rows, BS]: (probabilities, factor of earlier sums, largest, total)."""
    new_largest = tl.maximum(largest, tl.max(scores, axis=1))
    base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    p = tl.exp(scores - base[:, None])
    correction = tl.exp(largest - base)
    return p, correction, new_largest, total * correction + tl.sum(p, axis=1)


@triton.jit
def divided(acc, largest, total, sink, SINKS: tl.constexpr):
    """Weighted values acc [rows, DB] divided by their sums, in which the score `sink` takes part; zeros for a row that
    sees no slot.
    """
    if SINKS:
        most = tl.maximum(largest, sink)
        own = tl.exp(largest - most)
        acc = acc * own[:, None]
        total = tl.where(total == 0.0, 0.0, total * own + tl.exp(sink - most))
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def _attend_one(
    context_ptr, partial_ptr, sums_ptr, arrived_ptr, queries_ptr, keys_ptr, values_ptr,
    key_scales_ptr, value_scales_ptr, C, scale, slopes_ptr, sinks_ptr, first_ptr, past_ptr, visible_ptr,
    key_positions_ptr, stride,
    HKV: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DB: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, ALIBI: tl.constexpr, SINKS: tl.constexpr, HOLES: tl.constexpr,
    SCALED: tl.constexpr, SPLITS: tl.constexpr, SP: tl.constexpr, BS: tl.constexpr, DOT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One new token per sequence. Program (split, KV head, sequence) takes a share of the slots, for the G query heads
    of a KV head, which read the same keys and values.

    At batch 1 there are fewer KV heads than multiprocessors, so the slots are split until all have work. The last
    program to arrive adds up the shares in the order of the slots. This saves a launch, and the result does not depend
    on which program was last.
    """
    wait_for_previous(PDL)  # at once, because the previous kernel wrote queries, keys and values
    split, kv_head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    past = tl.load(past_ptr)
    begin = tl.load(first_ptr + b)
    if WINDOW != 0:
        begin = tl.maximum(begin, past + 1 - WINDOW)
    length = tl.maximum(past + 1 - begin, 0)
    share = tl.cdiv(tl.cdiv(length, SPLITS), BS) * BS
    low = begin + split * share
    high = tl.minimum(low + share, past + 1)

    g = tl.arange(0, GP)
    d = tl.arange(0, DB)
    head = kv_head * G + g
    of_head = (b * (HKV * G) + head)[:, None] * D + d[None, :]
    head_mask = (g < G)[:, None] & (d < D)[None, :]
    q = tl.load(queries_ptr + of_head, mask=head_mask, other=0.0).to(tl.float32) * scale
    slope = tl.zeros((GP,), tl.float32)
    if ALIBI:
        slope += tl.load(slopes_ptr + head, mask=g < G, other=0.0)
    sink = tl.zeros((GP,), tl.float32)
    if SINKS:
        sink += tl.load(sinks_ptr + head, mask=g < G, other=0.0)
    slots = (b * HKV + kv_head).to(tl.int64) * C
    largest = tl.full((GP,), float("-inf"), tl.float32)
    total = tl.zeros((GP,), tl.float32)
    if GP == 1:  # one query is multiplied element by element, and summed over the slots once after the loop
        acc = tl.zeros((BS, DB), tl.float32)
    else:  # several queries go through the matrix unit, padded to its 16 rows
        acc = tl.zeros((GP, DB), tl.float32)
    for start in range(low, high, BS):
        j = start + tl.arange(0, BS)
        live = j < high
        inside = live[:, None] & (d < D)[None, :]
        k = key_tile(keys_ptr + slots * DP, j, d, inside, DP)
        v = key_tile(values_ptr + slots * DP, j, d, inside, DP)
        if GP == 1:
            scores = tl.sum(k.to(tl.float32) * q, axis=1)[None, :]
        else:
            scores = tl.dot(q.to(DOT), tl.trans(k).to(DOT), input_precision="ieee")
        scores = times_scales(scores, key_scales_ptr + slots, j, live, SCALED)
        seen = live[None, :] & (g < GP)[:, None]
        scores = masked_scores(
            scores, j, live, seen, b, slope, key_positions_ptr, visible_ptr, stride, CAP, ALIBI, HOLES
        )
        p, correction, largest, total = softmax_step(scores, largest, total)
        p = times_scales(p, value_scales_ptr + slots, j, live, SCALED)
        if GP == 1:
            acc = acc * tl.sum(correction) + tl.trans(p) * v.to(tl.float32)
        else:
            acc = tl.dot(p.to(DOT), v.to(DOT), acc * correction[:, None], input_precision="ieee")
    if GP == 1:
        acc = tl.sum(acc, axis=0)[None, :]
    if SPLITS == 1:
        tl.store(context_ptr + of_head, divided(acc, largest, total, sink, SINKS), mask=head_mask)
    else:
        part = (b * (HKV * G) + head) * SPLITS
        tl.store(partial_ptr + (part + split)[:, None] * D + d[None, :], acc, mask=head_mask)
        tl.store(sums_ptr + 2 * (part + split), largest, mask=g < G)
        tl.store(sums_ptr + 2 * (part + split) + 1, total, mask=g < G)
        # Barrier: all threads of the program write before one counts up. acq_rel: other programs see the writes.
        tl.debug_barrier()
        before = tl.atomic_add(arrived_ptr + b * HKV + kv_head, 1, sem="acq_rel")
        if before == SPLITS - 1:
            # Shares of other programs bypass the first-level cache (.cg), which is not coherent.
            tl.debug_barrier()
            shares = tl.arange(0, SP)
            row = part[:, None] + shares[None, :]  # of partial_ptr and sums_ptr
            share_mask = (g < G)[:, None] & (shares < SPLITS)[None, :]
            theirs = tl.load(sums_ptr + 2 * row, mask=share_mask, other=float("-inf"), cache_modifier=".cg")
            sums = tl.load(sums_ptr + 2 * row + 1, mask=share_mask, other=0.0, cache_modifier=".cg")
            largest = tl.max(theirs, axis=1)
            base = tl.where(largest == float("-inf"), 0.0, largest)
            weights = tl.exp(theirs - base[:, None])
            total = tl.sum(weights * sums, axis=1)
            if GP == 1:  # all shares at once, so that one load is waited for instead of one per share
                at = tl.trans(row) * D + d[None, :]
                mask = (shares < SPLITS)[:, None] & (d < D)[None, :]
                out = tl.sum(
                    tl.trans(weights) * tl.load(partial_ptr + at, mask=mask, other=0.0, cache_modifier=".cg"), axis=0
                )[None, :]
            else:
                out = tl.zeros((GP, DB), tl.float32)
                for s in tl.range(SPLITS, loop_unroll_factor=4):
                    weight = tl.sum(tl.where(shares[None, :] == s, weights, 0.0), axis=1)
                    at = partial_ptr + (part + s)[:, None] * D + d[None, :]
                    out += weight[:, None] * tl.load(at, mask=head_mask, other=0.0, cache_modifier=".cg")
            tl.store(context_ptr + of_head, divided(out, largest, total, sink, SINKS), mask=head_mask)
            tl.store(arrived_ptr + b * HKV + kv_head, 0)  # for the next layer


@triton.jit
def _attend_many(
    context_ptr, queries_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, T, C, scale, slopes_ptr,
    sinks_ptr, first_ptr, past_ptr, visible_ptr, key_positions_ptr, stride,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DB: tl.constexpr,
    WINDOW: tl.constexpr, CAUSAL: tl.constexpr, CAP: tl.constexpr, ALIBI: tl.constexpr, SINKS: tl.constexpr,
    HOLES: tl.constexpr, SCALED: tl.constexpr, BQ: tl.constexpr, BS: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Several new tokens per sequence: program (BQ of the tokens, query head, sequence) walks over the slots.

    It begins at the first slot that any of its tokens sees, and ends at the last.
    """
    wait_for_previous(PDL)
    tile, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    past = tl.load(past_ptr)
    begin = tl.load(first_ptr + b)
    t = tile * BQ + tl.arange(0, BQ)
    d = tl.arange(0, DB)
    own = past + t
    high = past + T
    if CAUSAL:
        high = past + tl.minimum((tile + 1) * BQ, T)
    low = begin
    if WINDOW != 0:
        low = tl.maximum(low, past + tile * BQ + 1 - WINDOW)
    at = ((b * T + t)[:, None].to(tl.int64) * (HKV * G) + head) * D + d[None, :]
    mask = (t < T)[:, None] & (d < D)[None, :]
    q = (tl.load(queries_ptr + at, mask=mask, other=0.0).to(tl.float32) * scale).to(DOT)
    slope = tl.zeros((BQ,), tl.float32)
    if ALIBI:
        slope += tl.load(slopes_ptr + head)
    sink = tl.zeros((BQ,), tl.float32)
    if SINKS:
        sink += tl.load(sinks_ptr + head)
    slots = (b * HKV + head // G).to(tl.int64) * C
    largest = tl.full((BQ,), float("-inf"), tl.float32)
    total = tl.zeros((BQ,), tl.float32)
    acc = tl.zeros((BQ, DB), tl.float32)
    for start in range(low, high, BS):
        j = start + tl.arange(0, BS)
        live = j < high
        inside = live[:, None] & (d < D)[None, :]
        k = key_tile(keys_ptr + slots * DP, j, d, inside, DP)
        v = key_tile(values_ptr + slots * DP, j, d, inside, DP)
        scores = tl.dot(q, tl.trans(k).to(DOT), input_precision="ieee")
        scores = times_scales(scores, key_scales_ptr + slots, j, live, SCALED)
        seen = live[None, :] & (t < T)[:, None]
        if CAUSAL:
            seen = live[None, :] & (j[None, :] <= own[:, None])
        if WINDOW != 0:
            seen = seen & (j[None, :] > own[:, None] - WINDOW)
        scores = masked_scores(
            scores, j, live, seen, b, slope, key_positions_ptr, visible_ptr, stride, CAP, ALIBI, HOLES
        )
        p, correction, largest, total = softmax_step(scores, largest, total)
        p = times_scales(p, value_scales_ptr + slots, j, live, SCALED)
        acc = tl.dot(p.to(DOT), v.to(DOT), acc * correction[:, None], input_precision="ieee")
    tl.store(context_ptr + at, divided(acc, largest, total, sink, SINKS), mask=mask)


@dataclass(frozen=True)
class Partials:
    """Memory for the shares of one attention call."""

    contexts: Tensor
    sums: Tensor  # pairs of (largest score, sum)
    arrived: Tensor  # number of programs that have arrived, by sequence and KV head; zero between two calls

    @classmethod
    def of(cls, batch: int, heads: Heads, device: torch.device) -> "Partials":
        """Memory for up to MOST_SPLITS shares per sequence."""
        shares = batch * heads.query * MOST_SPLITS
        return cls(
            torch.empty(shares, heads.dim, device=device),
            torch.empty(shares, 2, device=device),
            torch.zeros(batch * heads.kv, dtype=torch.int32, device=device),
        )


def attention(
    queries: Tensor,
    params: AttentionParams,
    heads: Heads,
    rows: Rows,
    cache: LayerCache,
    context: Tensor,
    launch: Launcher,
    partials: Partials | None = None,
) -> Tensor:
    """Writes context [M, Hq*D] of any floating type; see the op's contract. `partials`: memory to reuse; None: new."""
    table = rows.visible if rows.visible is not None else rows.key_positions
    alibi = params.slopes is not None and rows.key_positions is not None
    width = triton.next_power_of_2(heads.dim)
    shared = {
        "context_ptr": context,
        "queries_ptr": queries,
        "keys_ptr": cache.keys,
        "values_ptr": cache.values,
        "key_scales_ptr": optional(cache.key_scales, queries),
        "value_scales_ptr": optional(cache.value_scales, queries),
        "C": cache.keys.shape[2],
        "scale": params.scale,
        "slopes_ptr": optional(params.slopes, queries),
        "sinks_ptr": optional(params.sinks, queries),
        "first_ptr": rows.first,
        "past_ptr": cache.past_on_device,
        "visible_ptr": optional(rows.visible, queries),
        "key_positions_ptr": optional(rows.key_positions, queries),
        "stride": 0 if table is None else table.shape[1],
        "HKV": heads.kv,
        "G": heads.query // heads.kv,
        "D": heads.dim,
        "DP": cache.keys.shape[3],
        "DB": max(width, 16),
        "WINDOW": params.window or 0,
        "CAP": params.cap or 0.0,
        "ALIBI": alibi,
        "SINKS": params.sinks is not None,
        "HOLES": rows.visible is not None,
        "SCALED": cache.key_scales is not None,
        "DOT": dot_type(cache.keys.dtype),
    }
    if rows.tokens > 1:
        halves = cache.keys.itemsize <= 2
        block = 64 if halves and width <= 128 else 32
        tile = Tile(rows=block, depth=block, warps=4 if halves else 8, stages=2)
        grid = (triton.cdiv(rows.tokens, block), heads.query, rows.batch)
        launch(_attend_many, grid, tile, **shared, T=rows.tokens, CAUSAL=params.causal, BQ=block, BS=block)
        return context
    splits = splits_for(rows.batch, heads, cache.keys.shape[2])
    if partials is None:
        partials = Partials.of(rows.batch, heads, queries.device)
    grouped = heads.query > heads.kv
    block = 32 if interpreted() or width > 128 else 64
    launch(
        _attend_one,
        (splits, heads.kv, rows.batch),
        Tile(rows=1, depth=block, warps=4, stages=2 if grouped else 1),
        **shared,
        partial_ptr=partials.contexts,
        sums_ptr=partials.sums,
        arrived_ptr=partials.arrived,
        GP=max(16, triton.next_power_of_2(heads.query // heads.kv)) if grouped else 1,
        SPLITS=splits,
        SP=triton.next_power_of_2(splits),
        BS=block,
    )
    return context


def splits_for(batch: int, heads: Heads, capacity: int) -> int:
    """Number of shares of a sequence's slots: two programs per multiprocessor, at least 64 slots each if the cache is
    full.
    """
    splits = triton.cdiv(2 * processors(), batch * heads.kv)
    return max(1, min(splits, triton.cdiv(capacity, 64), MOST_SPLITS))
