"""Kernels of a decode step that belong to no single op: embedding, regions 1 and 3 together, the gate of a shared
expert, choice of a token.
"""

import triton
import triton.language as tl

from ..mlp_gemm.triton_impl import mlp_gemm_kernel
from ..qkv_gemm.triton_impl import qkv_gemm_kernel
from ..tiles import code_of, normed_row, product, wait_for_previous


@triton.jit
def add_gated(total_ptr, x_ptr, gates_ptr, H, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Adds sigmoid(gate) * x to total [M, H]. gates [M]: a gate for each row."""
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, at = column < H, row * H + column
    x = tl.load(x_ptr + at, mask=inside, other=0.0) * tl.sigmoid(tl.load(gates_ptr + row))
    tl.store(total_ptr + at, tl.load(total_ptr + at, mask=inside, other=0.0) + x, mask=inside)


@triton.jit
def embed(
    out_ptr, table_ptr, scales_ptr, tokens_ptr, begin, position_table_ptr, positions_ptr, offset,
    scale, eps, gain_ptr, shift_ptr,
    E: tl.constexpr, CODES: tl.constexpr, POSITIONS: tl.constexpr, NORM: tl.constexpr, SHIFT: tl.constexpr,
    NORM_FIRST: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [M, E] = norm(scale * table[begin + token] + position_table[position + offset]), one row per program.
    NORM_FIRST: the position's row is added to the normed one.
    """
    wait_for_previous(PDL)
    m = tl.program_id(0)
    token = (begin + tl.maximum(tl.load(tokens_ptr + m), 0)).to(tl.int64)  # -1: all logits were NaN
    k = tl.arange(0, BLOCK)
    inside = k < E
    BITS: tl.constexpr = CODES[0]
    GROUP: tl.constexpr = CODES[1]
    NUMBERS: tl.constexpr = CODES[2]
    if BITS == 0:
        x = tl.load(table_ptr + token * E + k, mask=inside, other=0.0).to(tl.float32)
    else:
        PARTS: tl.constexpr = 32 // BITS
        WIDTH: tl.constexpr = (E + PARTS - 1) // PARTS
        words = tl.load(table_ptr + token * WIDTH + k % WIDTH, mask=inside, other=0)
        scales = scales_ptr + (token * ((E + GROUP - 1) // GROUP) + k // GROUP) * NUMBERS
        x = code_of(words, k // WIDTH, BITS, NUMBERS == 2)
        x *= tl.load(scales, mask=inside, other=0.0).to(tl.float32)
        if NUMBERS == 2:
            x += tl.load(scales + 1, mask=inside, other=0.0).to(tl.float32)
    x *= scale
    if NORM_FIRST:
        x = normed_row(x, gain_ptr, shift_ptr, eps, k, E, NORM, SHIFT)
    if POSITIONS:
        position = (tl.load(positions_ptr + m) + offset).to(tl.int64)
        x += tl.load(position_table_ptr + position * E + k, mask=inside, other=0.0)
    if not NORM_FIRST:
        x = normed_row(x, gain_ptr, shift_ptr, eps, k, E, NORM, SHIFT)
    tl.store(out_ptr + m.to(tl.int64) * E + k, x, mask=inside)


@triton.jit
def qkv_and_mlp(
    qkv_programs, queries_ptr, keys_ptr, values_ptr, M, C, eps, x_ptr, gain_ptr, shift_ptr,
    w_ptr, scales_ptr, bias_ptr, cosine_ptr, sine_ptr, positions_ptr, past_ptr,
    act_ptr, N, mlp_eps, mlp_gain_ptr, mlp_shift_ptr, mlp_w_ptr, mlp_scales_ptr, mlp_bias_ptr,
    NORM: tl.constexpr, SHIFT: tl.constexpr, K: tl.constexpr, CODES: tl.constexpr, BIAS: tl.constexpr,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    R: tl.constexpr, INTERLEAVED: tl.constexpr, T: tl.constexpr,
    MLP_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, AHEAD: tl.constexpr, MP: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Regions 1 and 3 of a parallel layer, which read the same rows. Each has some of the programs."""
    if tl.program_id(0) < qkv_programs:
        qkv_gemm_kernel(
            0, queries_ptr, keys_ptr, values_ptr, x_ptr, M, C, eps,
            x_ptr, gain_ptr, shift_ptr, w_ptr, scales_ptr, bias_ptr, cosine_ptr, sine_ptr, positions_ptr, past_ptr,
            NORM, SHIFT, "none", K, CODES, BIAS, HQ, HKV, D, DP, R, INTERLEAVED, T, BN, BK, AHEAD, MP, DOT, PDL,
        )  # fmt: skip
    else:
        mlp_gemm_kernel(
            qkv_programs, act_ptr, x_ptr, M, N, mlp_eps,
            x_ptr, x_ptr, x_ptr, mlp_gain_ptr, mlp_shift_ptr, mlp_w_ptr, mlp_scales_ptr, mlp_bias_ptr,
            NORM, SHIFT, False, False, "none", K, CODES, MLP_BIAS, ACTIVATION, GATED, BN, BK, AHEAD, MP, DOT, PDL,
        )  # fmt: skip


@triton.jit
def head_argmax(
    best_ptr, where_ptr, M, N, eps, gain_ptr, shift_ptr, x_ptr, w_ptr, scales_ptr, bias_ptr,
    NORM: tl.constexpr, SHIFT: tl.constexpr, K: tl.constexpr, CODES: tl.constexpr, BIAS: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, AHEAD: tl.constexpr, MP: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Writes the largest of BN logits and its first row to best and where [programs, MP]. NaN counts as -inf."""
    tile = tl.program_id(0)
    rows = tile * BN + tl.arange(0, BN)
    inside = rows < N
    y = product(
        w_ptr, scales_ptr, rows, inside, x_ptr, x_ptr, x_ptr, gain_ptr, shift_ptr, eps, x_ptr, M,
        K, CODES, NORM, SHIFT, False, False, "none", BN, BK, AHEAD, MP, DOT, PDL,
    )  # fmt: skip
    if BIAS:
        y += tl.load(bias_ptr + rows, mask=inside, other=0.0)[:, None]
    y = tl.where(inside[:, None] & (y == y), y, float("-inf"))
    best = tl.max(y, axis=0)
    where = tl.min(tl.where(y == best[None, :], rows[:, None], N), axis=0)
    at = tile * MP + tl.arange(0, MP)
    tl.store(best_ptr + at, best)
    tl.store(where_ptr + at, where)


@triton.jit
def next_step(
    tokens_ptr, past_ptr, positions_ptr, best_ptr, where_ptr, programs, M,
    CHOOSE: tl.constexpr, MB: tl.constexpr, MP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Advances slot and positions by one. With CHOOSE, the next tokens have the largest logits, the first token among
    equal logits, and are -1 if all logits are NaN.
    """
    wait_for_previous(PDL)
    m = tl.arange(0, MB)
    if CHOOSE:
        best = tl.full((BLOCK, MB), float("-inf"), tl.float32)
        where = tl.full((BLOCK, MB), 2147483647, tl.int32)
        for begin in range(0, programs, BLOCK):
            program = begin + tl.arange(0, BLOCK)
            mask = (program < programs)[:, None] & (m < M)[None, :]
            at = program[:, None] * MP + m[None, :]
            theirs = tl.load(best_ptr + at, mask=mask, other=float("-inf"))
            rows = tl.load(where_ptr + at, mask=mask, other=0)
            where = tl.where(theirs > best, rows, where)
            best = tl.maximum(best, theirs)
        largest = tl.max(best, axis=0)
        first = tl.min(tl.where(best == largest[None, :], where, 2147483647), axis=0)
        token = tl.where(largest == float("-inf"), -1, first)
        tl.store(tokens_ptr + m, token.to(tl.int64), mask=m < M)
    tl.store(positions_ptr + m, tl.load(positions_ptr + m, mask=m < M) + 1, mask=m < M)
    tl.store(past_ptr, tl.load(past_ptr) + 1)
