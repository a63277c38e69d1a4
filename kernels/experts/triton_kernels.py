"""The kernels of a mixture of experts in Triton.

Letters: M rows, K experts of a row, C = M * K choices, number m * K + k for choice k of row m. E experts; a choice of
expert E stands for none. H inputs, I activations, O outputs of an expert.

The choices are in the order of their experts: the place of a choice is its number in this order. Blocks of up to MP
choices of one expert pass its matrices together. The device alone knows the number of blocks, so a grid has programs
for the largest possible number, and programs without a block return at once. With MP = 1 each choice is a block, at the
place of its number.
"""

import triton
import triton.language as tl

from ..mlp_gemm.triton_impl import act_of, up_rows
from ..tiles import product, product_of_rows, wait_for_previous


@triton.jit
def sort_choices(chosen_ptr, begins_ptr, order_ptr, places_ptr, C, E, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """The choices of expert `program_id(0)`: begins [E + 1] gets the place of its first choice, order [C] the choice of
    each place, and places [C] the reverse. Choices of no expert have no place.
    """
    wait_for_previous(PDL)
    expert = tl.program_id(0)
    before = expert * 0
    own = expert * 0
    for begin in range(0, C, BLOCK):
        choice = begin + tl.arange(0, BLOCK)
        chosen = tl.load(chosen_ptr + choice, mask=choice < C, other=E)
        before += tl.sum((chosen < expert).to(tl.int32), axis=0)
        own += tl.sum((chosen == expert).to(tl.int32), axis=0)
    tl.store(begins_ptr + expert, before)
    if expert == E - 1:
        tl.store(begins_ptr + E, before + own)
    place = before
    for begin in range(0, C, BLOCK):
        choice = begin + tl.arange(0, BLOCK)
        mine = tl.load(chosen_ptr + choice, mask=choice < C, other=E) == expert
        at = place + tl.cumsum(mine.to(tl.int32), axis=0) - 1
        tl.store(order_ptr + at, choice, mask=mine)
        tl.store(places_ptr + choice, at, mask=mine)
        place += tl.sum(mine.to(tl.int32), axis=0)


@triton.jit
def block_of(block, chosen_ptr, begins_ptr, E, EP: tl.constexpr, MP: tl.constexpr):
    """(expert, place of the first choice, number of choices) of a block. Expert E: this program has no block."""
    if MP == 1:
        expert = tl.load(chosen_ptr + block).to(tl.int32)
        first = block
        count = 1
    else:
        every = tl.arange(0, EP)
        begins = tl.load(begins_ptr + every, mask=every < E, other=0)
        ends = tl.load(begins_ptr + every + 1, mask=every < E, other=0)
        blocks = (ends - begins + MP - 1) // MP
        until = tl.cumsum(blocks, axis=0)
        expert = tl.sum(((until <= block) & (every < E)).to(tl.int32), axis=0)
        mine = (every == expert) & (every < E)
        first_block = tl.sum(tl.where(mine, until - blocks, 0), axis=0)
        first = tl.sum(tl.where(mine, begins, 0), axis=0) + (block - first_block) * MP
        count = tl.minimum(tl.sum(tl.where(mine, ends, 0), axis=0) - first, MP)
    return expert, first, count


@triton.jit
def experts_up(
    act_ptr, x_ptr, w_ptr, scales_ptr, bias_ptr, chosen_ptr, begins_ptr, order_ptr, N, E, CHOICES,
    K: tl.constexpr, CODES: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    EP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, AHEAD: tl.constexpr, MP: tl.constexpr, DOT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """act [C, N] of block `program_id(0)`, by place: the tile `program_id(1)` of the first matrix with its activation.
    x [M, K]. The matrices of all experts lie one below the other. CHOICES: of a row.
    """
    wait_for_previous(PDL)
    expert, first, count = block_of(tl.program_id(0), chosen_ptr, begins_ptr, E, EP, MP)
    if expert < E:
        m = tl.arange(0, MP)
        if MP == 1:
            row = (first + m) // CHOICES
        else:
            row = tl.load(order_ptr + first + m, mask=m < count, other=0) // CHOICES
        n, rows, inside = up_rows(tl.program_id(1), N, GATED, BN)
        rows += expert * (2 * N if GATED else N)
        y = product_of_rows(
            w_ptr, scales_ptr, rows, inside, x_ptr, x_ptr, x_ptr, x_ptr, x_ptr, 0.0, x_ptr, row.to(tl.int64), m < count,
            K, CODES, "none", False, False, False, "none", BN, BK, AHEAD, MP, DOT, False,
        )  # fmt: skip
        act = act_of(y, bias_ptr, rows, inside, BIAS, ACTIVATION, GATED, BN, MP)
        at = act_ptr + first.to(tl.int64) * N + m[None, :] * N + n[:, None]
        tl.store(at, act, mask=(n < N)[:, None] & (m < count)[None, :])


@triton.jit
def experts_down(
    out_ptr, x_ptr, w_ptr, scales_ptr, bias_ptr, chosen_ptr, begins_ptr, N, E,
    K: tl.constexpr, CODES: tl.constexpr, BIAS: tl.constexpr,
    EP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, AHEAD: tl.constexpr, MP: tl.constexpr, DOT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out [C, N] of block `program_id(0)`, by place: the tile `program_id(1)` of the second matrix. x [C, K]: the
    activations, by place.
    """
    wait_for_previous(PDL)
    expert, first, count = block_of(tl.program_id(0), chosen_ptr, begins_ptr, E, EP, MP)
    if expert < E:
        m = tl.arange(0, MP)
        n = tl.program_id(1) * BN + tl.arange(0, BN)
        inside = n < N
        rows = expert * N + n
        x_ptr += first.to(tl.int64) * K
        y = product(
            w_ptr, scales_ptr, rows, inside, x_ptr, x_ptr, x_ptr, x_ptr, x_ptr, 0.0, x_ptr, count,
            K, CODES, "none", False, False, False, "none", BN, BK, AHEAD, MP, DOT, False,
        )  # fmt: skip
        if BIAS:
            y += tl.load(bias_ptr + rows, mask=inside, other=0.0)[:, None]
        at = out_ptr + first.to(tl.int64) * N + m[None, :] * N + n[:, None]
        tl.store(at, y, mask=inside[:, None] & (m < count)[None, :])


@triton.jit
def experts_sum(
    out_ptr, residual_ptr, outputs_ptr, chosen_ptr, shares_ptr, places_ptr, N, E, CHOICES,
    RESIDUAL: tl.constexpr, SORTED: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [M, N] = residual + the sum of share * output over the choices of row `program_id(0)`, in the order of the
    experts. outputs [C, N], by place if they are SORTED.
    """
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < N
    k = tl.arange(0, KP)
    chosen = tl.load(chosen_ptr + row * CHOICES + k, mask=k < CHOICES, other=E).to(tl.int32)
    # The smallest number belongs to the first expert that is left, and the choice is its remainder.
    numbers = tl.where(chosen < E, chosen * KP + k, E * KP)
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in range(CHOICES):
        number = tl.min(numbers, axis=0)
        numbers = tl.where(numbers == number, E * KP, numbers)
        if number < E * KP:
            choice = row * CHOICES + number % KP
            place = tl.load(places_ptr + choice).to(tl.int64) if SORTED else choice
            y = tl.load(outputs_ptr + place * N + n, mask=inside, other=0.0)
            total += tl.load(shares_ptr + choice) * y
    if RESIDUAL:
        total += tl.load(residual_ptr + row * N + n, mask=inside, other=0.0)
    tl.store(out_ptr + row * N + n, total, mask=inside)
