"""Region 1 in Triton: norm, product, rotation and append to the KV cache in one kernel.

With norms of heads or an int8 cache there are two kernels, because the norm of a head and its scale need the whole
head, and a program owns only some of its rows. Beyond 16 rows the second kernel follows torch's GEMM.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gemm.triton_impl import gemm, matmul, product_arguments, tile_arguments, tile_type
from ..gpu import FEW_ROWS, Launcher, optional
from ..plain import normalise
from ..tiles import product, wait_for_previous
from ..tuned import Tile
from ..types import Heads, LayerCache, QkvWeights, Rotary, Rows

TILE = Tile(rows=16, depth=1)


@triton.jit
def pair_columns(pair, D: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The two columns of a head in pair number `pair` of D / 2. Pairs that rotate together come first, then the others.

    A program multiplies pairs, so that both numbers of a rotation are in its registers.
    """
    first, second = 2 * pair, 2 * pair + 1
    if R != 0 and not INTERLEAVED:
        turns = pair < R // 2
        first = tl.where(turns, pair, first)
        second = tl.where(turns, pair + R // 2, second)
    return first, second


@triton.jit
def rotated(a, b, cosine_ptr, sine_ptr, positions, pair, turns, R: tl.constexpr):
    """The pairs a, b [BP, MP], rotated by the angles of their positions where `turns` [BP, MP] is true."""
    at = positions[None, :] * (R // 2) + pair[:, None]
    cosine = tl.load(cosine_ptr + at, mask=turns, other=1.0)
    sine = tl.load(sine_ptr + at, mask=turns, other=0.0)
    return a * cosine - b * sine, b * cosine + a * sine


@triton.jit
def qkv_gemm_kernel(
    begin, queries_ptr, keys_ptr, values_ptr, residual_ptr, M, C, eps,
    x_ptr, gain_ptr, shift_ptr, w_ptr, scales_ptr, bias_ptr, cosine_ptr, sine_ptr, positions_ptr, past_ptr,
    NORM: tl.constexpr, SHIFT: tl.constexpr, RESIDUAL: tl.constexpr,
    K: tl.constexpr, CODES: tl.constexpr, BIAS: tl.constexpr,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    R: tl.constexpr, INTERLEAVED: tl.constexpr, T: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, AHEAD: tl.constexpr, MP: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """From program `begin` on, each program computes BN / 2 pairs of columns of the query, key and value heads, in this
    order. Row m is token m % T of sequence m // T and goes to slot past + m % T.
    """
    m = tl.arange(0, MP)
    at = (tl.program_id(0) - begin) * (BN // 2) + tl.arange(0, BN // 2)
    head, pair = at // (D // 2), at % (D // 2)
    first, second = pair_columns(pair, D, R, INTERLEAVED)
    rows = tl.reshape(tl.join(head * D + first, head * D + second), (BN,))
    row_mask = rows < (HQ + 2 * HKV) * D
    y = product(
        w_ptr, scales_ptr, rows, row_mask, x_ptr, x_ptr, x_ptr, gain_ptr, shift_ptr, eps, residual_ptr, M,
        K, CODES, NORM, SHIFT, False, False, RESIDUAL, BN, BK, AHEAD, MP, DOT, PDL,
    )  # fmt: skip
    if BIAS:
        y += tl.load(bias_ptr + rows, mask=row_mask, other=0.0)[:, None]
    a, b = tl.split(tl.permute(tl.reshape(y, (BN // 2, 2, MP)), (0, 2, 1)))
    live = (m < M)[None, :] & (head < HQ + 2 * HKV)[:, None]
    if R != 0:
        positions = tl.load(positions_ptr + m, mask=m < M, other=0)
        turns = live & (head < HQ + HKV)[:, None] & (pair < R // 2)[:, None]
        a, b = rotated(a, b, cosine_ptr, sine_ptr, positions, pair, turns, R)
    query = live & (head < HQ)[:, None]
    to = m[None, :] * (HQ * D) + (head * D)[:, None]
    tl.store(queries_ptr + to + first[:, None], a, mask=query)
    tl.store(queries_ptr + to + second[:, None], b, mask=query)
    slot = tl.load(past_ptr) + m % T
    key = live & ((head >= HQ) & (head < HQ + HKV))[:, None]
    of_key = ((m // T)[None, :].to(tl.int64) * HKV + (head - HQ)[:, None]) * C + slot[None, :]
    tl.store(keys_ptr + of_key * DP + first[:, None], a, mask=key)
    tl.store(keys_ptr + of_key * DP + second[:, None], b, mask=key)
    value = live & (head >= HQ + HKV)[:, None]
    of_value = of_key - HKV * C
    tl.store(values_ptr + of_value * DP + first[:, None], a, mask=value)
    tl.store(values_ptr + of_value * DP + second[:, None], b, mask=value)


@triton.jit
def quantised(a, b):
    """(int8, int8, scales bfloat16 [rows]) of heads whose numbers are the pairs a, b [rows, D / 2]: see int8_cache.py.

    Magnitudes are compared by their bits as integers, which have the same order, with infinity and NaN at the top.
    """
    bits = tl.maximum(a.to(tl.int32, bitcast=True) & 0x7FFFFFFF, b.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    wanted = tl.max(bits, axis=1).to(tl.float32, bitcast=True) / 127.0
    nearest = wanted.to(tl.bfloat16)
    up = (nearest.to(tl.float32) < wanted).to(tl.int16)
    scale = (nearest.to(tl.int16, bitcast=True) + up).to(tl.bfloat16, bitcast=True)
    step = scale.to(tl.float32)
    usable = (step > 0) & (step < float("inf"))
    step = tl.where(usable, step, 1.0)[:, None]
    # Adding 1.5 * 2^23 rounds to an integer; its last byte is the last byte of the sum.
    a = (a / step + 12582912.0).to(tl.int32, bitcast=True)
    b = (b / step + 12582912.0).to(tl.int32, bitcast=True)
    return tl.where(usable[:, None], a, 0).to(tl.int8), tl.where(usable[:, None], b, 0).to(tl.int8), scale


@triton.jit
def _finish_heads(
    queries_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr,
    wide_ptr, bias_ptr, q_norm_ptr, k_norm_ptr, qk_eps, M, C, cosine_ptr, sine_ptr, positions_ptr, past_ptr,
    BIAS: tl.constexpr, HEAD_NORM: tl.constexpr, SCALED: tl.constexpr,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    R: tl.constexpr, INTERLEAVED: tl.constexpr, T: tl.constexpr,
    BM: tl.constexpr, BP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Steps after the product [M, (HQ + 2 HKV) D]: bias, norm, rotation and store of one head of BM rows."""
    wait_for_previous(PDL)
    head = tl.program_id(1)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    pair = tl.arange(0, BP)
    first, second = pair_columns(pair, D, R, INTERLEAVED)
    first, second = first[None, :], second[None, :]
    inside = (pair < D // 2)[None, :]
    live = inside & (m < M)[:, None]
    from_wide = wide_ptr + m[:, None].to(tl.int64) * ((HQ + 2 * HKV) * D) + head * D
    a = tl.load(from_wide + first, mask=live, other=0.0).to(tl.float32)
    b = tl.load(from_wide + second, mask=live, other=0.0).to(tl.float32)
    if BIAS:
        a += tl.load(bias_ptr + head * D + first, mask=inside, other=0.0)
        b += tl.load(bias_ptr + head * D + second, mask=inside, other=0.0)
    if head < HQ + HKV:
        if HEAD_NORM:
            gain_ptr = q_norm_ptr
            if head >= HQ:
                gain_ptr = k_norm_ptr
            rstd = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / D + qk_eps)[:, None]
            a = a * rstd * tl.load(gain_ptr + first, mask=inside, other=0.0)
            b = b * rstd * tl.load(gain_ptr + second, mask=inside, other=0.0)
        if R != 0:
            positions = tl.load(positions_ptr + m, mask=m < M, other=0)
            at = positions[:, None] * (R // 2) + pair[None, :]
            turns = live & (pair < R // 2)[None, :]
            cosine = tl.load(cosine_ptr + at, mask=turns, other=1.0)
            sine = tl.load(sine_ptr + at, mask=turns, other=0.0)
            a, b = a * cosine - b * sine, b * cosine + a * sine
    if head < HQ:
        to_row = queries_ptr + (m[:, None].to(tl.int64) * HQ + head) * D
        tl.store(to_row + first, a, mask=live)
        tl.store(to_row + second, b, mask=live)
    else:
        to, to_scales = keys_ptr, key_scales_ptr
        if head >= HQ + HKV:
            to, to_scales = values_ptr, value_scales_ptr
        slot = ((m // T).to(tl.int64) * HKV + (head - HQ) % HKV) * C + tl.load(past_ptr) + m % T
        to_slot = to + slot[:, None] * DP
        if SCALED:
            whole_a, whole_b, scale = quantised(a, b)
            tl.store(to_scales + slot, scale, mask=m < M)
            tl.store(to_slot + first, whole_a, mask=live)
            tl.store(to_slot + second, whole_b, mask=live)
        else:
            tl.store(to_slot + first, a, mask=live)
            tl.store(to_slot + second, b, mask=live)


def qkv_gemm(
    hidden: Tensor,
    weights: QkvWeights,
    heads: Heads,
    rotary: Rotary | None,
    rows: Rows,
    cache: LayerCache,
    queries: Tensor,
    residual: Tensor | None,
    launch: Launcher,
) -> None:
    """Writes queries [M, Hq*D] of any floating type, keys and values, and, if given, residual [M, H] float32, the
    normed rows; see the op's contract.
    """
    of_heads = heads_arguments(heads, rotary and rotary.table(weights.table), rows, cache, queries)
    if len(hidden) > FEW_ROWS or weights.q_norm is not None or cache.key_scales is not None:
        return _finished_apart(hidden, weights, heads, cache, residual, of_heads, launch)
    tile = launch.tile("qkv_gemm", tile_type(weights.proj), len(hidden), weights.proj.outputs, weights.proj.inputs)
    launch(
        qkv_gemm_kernel,
        (qkv_tiles(weights, tile),),
        tile,
        begin=0,
        **of_heads,
        **product_arguments(hidden, weights.norm, weights.proj, weights.proj.bias),
        **tile_arguments(len(hidden), weights.proj, tile),
        residual_ptr=optional(residual, hidden),
        RESIDUAL="none" if residual is None else "normed",
    )


def qkv_tiles(weights: QkvWeights, tile: Tile) -> int:
    """Number of programs of region 1 with tiles of this size."""
    return triton.cdiv(weights.proj.outputs, tile.rows)


def heads_arguments(
    heads: Heads, rotary: Rotary | None, rows: Rows, cache: LayerCache, queries: Tensor
) -> dict[str, object]:
    """The kernels' arguments of the heads: their numbers, their destinations, and the tables of their rotation."""
    return {
        "queries_ptr": queries,
        "keys_ptr": cache.keys,
        "values_ptr": cache.values,
        "C": cache.keys.shape[2],
        "cosine_ptr": rotary.cosine if rotary else queries,
        "sine_ptr": rotary.sine if rotary else queries,
        "positions_ptr": rows.positions,
        "past_ptr": cache.past_on_device,
        "HQ": heads.query,
        "HKV": heads.kv,
        "D": heads.dim,
        "DP": cache.keys.shape[3],
        "R": 2 * rotary.cosine.shape[1] if rotary else 0,
        "INTERLEAVED": rotary.interleaved if rotary else False,
        "T": rows.tokens,
    }


def _finished_apart(
    hidden: Tensor,
    weights: QkvWeights,
    heads: Heads,
    cache: LayerCache,
    residual: Tensor | None,
    of_heads: dict[str, object],
    launch: Launcher,
) -> None:
    proj = weights.proj
    bias = None
    if len(hidden) > FEW_ROWS:
        normed = normalise(weights.norm, hidden)
        wide, bias = matmul(normed, proj), proj.bias
        if residual is not None:
            residual.copy_(normed)
    else:
        wide = torch.empty(len(hidden), proj.outputs, device=hidden.device)
        gemm(hidden, proj, wide, launch, norm=weights.norm)
        if residual is not None:
            residual.copy_(normalise(weights.norm, hidden))
    launch(
        _finish_heads,
        (triton.cdiv(len(hidden), TILE.rows), heads.query + 2 * heads.kv),
        TILE,
        **of_heads,
        M=len(hidden),
        key_scales_ptr=optional(cache.key_scales, hidden),
        value_scales_ptr=optional(cache.value_scales, hidden),
        wide_ptr=wide,
        bias_ptr=optional(bias, hidden),
        q_norm_ptr=optional(weights.q_norm, hidden),
        k_norm_ptr=optional(weights.k_norm, hidden),
        qk_eps=weights.qk_eps,
        BIAS=bias is not None,
        HEAD_NORM=weights.q_norm is not None,
        SCALED=cache.key_scales is not None,
        BM=TILE.rows,
        BP=triton.next_power_of_2(heads.dim // 2),
    )
