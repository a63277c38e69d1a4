"""Parts of the Triton kernels: products of normed rows of activations with rows of a weight.

Letters: M rows of activations (tokens), padded to MP; N outputs, BN of them in a tile; K inputs, BK of them in a step.
Matrices are row-major [N, K]. Sums are float32. Every program reads its weights once, for all M rows.

At small batch a product is bound by reading its weights. A program owns BN whole rows of the weight, so no two programs
share a sum: nothing is exchanged between programs, and the result does not depend on their order.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Programmatic dependent launch: after this call the results of the previous kernels may be read.

    Every program calls it, even a program without work, so that a kernel's end implies the end of all earlier kernels.
    Weights never change, so a kernel may read its first weights before the call.
    """
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


@triton.jit
def soft_capped(x, CAP: tl.constexpr):
    """CAP * tanh(x / CAP), written with exp, because Triton's interpreter has no tanh."""
    t = tl.exp(tl.abs(x) * (-2.0 / CAP))
    y = CAP * (1.0 - t) / (1.0 + t)
    return tl.where(x < 0, -y, y)


@triton.jit
def code_of(words, part, BITS: tl.constexpr, RAISED: tl.constexpr):
    """Code number `part` of words of four 8-bit codes or eight 4-bit codes (codes.pack_words), as float32. RAISED: the
    lowest code counts as 0.

    The code plus 128 or 8 is put into the low bits of the float 2^23, whose last place is 1, and 2^23 is subtracted
    again. The hardware's own conversion from integers is so slow that a step would wait for it.
    """
    BEFORE: tl.constexpr = 0.0 if RAISED else 2.0 ** (BITS - 1)
    if BITS == 8:
        bits = ((words ^ -2139062144) >> (8 * part)) & 255
    else:
        bits = (words >> (8 * (part % 4) + 4 * (part // 4))) & 15
    return (bits | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + BEFORE)


@triton.jit
def scale_tile(
    scales_ptr, rows, row_mask, first, number, BN: tl.constexpr, BK: tl.constexpr,
    K: tl.constexpr, GROUP: tl.constexpr, NUMBERS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """float32 [BN, BK], or [BN, 1] if a row is a group: number 0 (scale) or 1 (minimum) of the groups of BK inputs,
    from `first` on, of the rows [BN].

    STEP: this many consecutive inputs belong to one group, so its number is loaded once and repeated for them.
    """
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    if GROUPS == 1:
        found = tl.load(scales_ptr + rows * NUMBERS + number, mask=row_mask, other=0.0).to(tl.float32)[:, None]
    else:
        group = (first + STEP * tl.arange(0, BK // STEP)) // GROUP
        at = (rows.to(tl.int64)[:, None] * GROUPS + group[None, :]) * NUMBERS + number
        mask = row_mask[:, None] & (group < GROUPS)[None, :]
        found = tl.load(scales_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if STEP > 1:
            found = tl.reshape(tl.broadcast_to(found[:, :, None], (BN, BK // STEP, STEP)), (BN, BK))
    return found


@triton.jit
def load_rows(
    x_ptr, addend_ptr, addend_bias_ptr, m, k, mask, K: tl.constexpr, ADD: tl.constexpr, ADD_BIAS: tl.constexpr
):
    """float32 tile [MP, BK] of x, or of x + addend (+ its bias); 0 outside of the mask.

    Every program reads the same few rows, so they should stay in the second-level cache (evict_last).
    """
    at = m[:, None] * K + k[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
    if ADD:
        x += tl.load(addend_ptr + at, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
        if ADD_BIAS:
            x += tl.where(mask, tl.load(addend_bias_ptr + k, mask=k < K, other=0.0)[None, :], 0.0)
    return x


@triton.jit
def row_moments(x, mask, eps, K: tl.constexpr, NORM: tl.constexpr):
    """mean [MP] (zeros for "rms") and 1 / sqrt(variance + eps) [MP] of whole rows x [MP, BLOCK], which are 0 outside of
    the mask.
    """
    if NORM == "layer":
        mean = tl.sum(x, axis=1) / K
    else:
        mean = tl.zeros((x.shape[0],), tl.float32)
    apart = tl.where(mask, x - mean[:, None], 0.0)
    return mean, tl.rsqrt(tl.sum(apart * apart, axis=1) / K + eps)


@triton.jit
def moments(
    x_ptr, addend_ptr, addend_bias_ptr, eps, m, m_mask,
    K: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr, ADD_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """mean [MP] (zeros for "rms") and 1 / sqrt(variance + eps) [MP] of the rows.

    Every program computes them again: the rows are a few KB in the cache, and a separate kernel would cost a launch.
    The variance has its own pass, because the mean of squares minus the square of the mean loses digits. A row that
    fits into a block is loaded once for both.
    """
    if BLOCK >= K:
        k = tl.arange(0, BLOCK)
        mask = m_mask[:, None] & (k < K)[None, :]
        x = load_rows(x_ptr, addend_ptr, addend_bias_ptr, m, k, mask, K, ADD, ADD_BIAS)
        mean, rstd = row_moments(x, mask, eps, K, NORM)
    else:
        mean = m.to(tl.float32) * 0.0
        if NORM == "layer":
            for begin in range(0, K, BLOCK):
                k = begin + tl.arange(0, BLOCK)
                mask = m_mask[:, None] & (k < K)[None, :]
                x = load_rows(x_ptr, addend_ptr, addend_bias_ptr, m, k, mask, K, ADD, ADD_BIAS)
                mean += tl.sum(x, axis=1) / K
        squares = m.to(tl.float32) * 0.0
        for begin in range(0, K, BLOCK):
            k = begin + tl.arange(0, BLOCK)
            mask = m_mask[:, None] & (k < K)[None, :]
            x = load_rows(x_ptr, addend_ptr, addend_bias_ptr, m, k, mask, K, ADD, ADD_BIAS)
            apart = tl.where(mask, x - mean[:, None], 0.0)
            squares += tl.sum(apart * apart, axis=1)
        rstd = tl.rsqrt(squares / K + eps)
    return mean, rstd


@triton.jit
def normed(x, mean, rstd, gain_ptr, shift_ptr, k, inside, NORM: tl.constexpr, SHIFT: tl.constexpr):
    """norm(x) of a tile [MP, BK]; columns that are not `inside` become 0."""
    if NORM != "none":
        x = (x - mean[:, None]) * rstd[:, None] * tl.load(gain_ptr + k, mask=inside, other=0.0)[None, :]
        if SHIFT:
            x += tl.load(shift_ptr + k, mask=inside, other=0.0)[None, :]
    return x


@triton.jit
def normed_row(x, gain_ptr, shift_ptr, eps, k, K: tl.constexpr, NORM: tl.constexpr, SHIFT: tl.constexpr):
    """norm(x) of a whole row of K numbers, at the columns k; columns from K on are 0, and stay 0."""
    if NORM != "none":
        inside = k < K
        if NORM == "layer":
            x = tl.where(inside, x - tl.sum(x) / K, 0.0)
        x = x * tl.rsqrt(tl.sum(x * x) / K + eps) * tl.load(gain_ptr + k, mask=inside, other=0.0)
        if SHIFT:
            x += tl.load(shift_ptr + k, mask=inside, other=0.0)
    return x


@triton.jit
def weight_tile(w_ptr, rows, k, row_mask, WIDTH: tl.constexpr):
    """Tile [BN, BK] in the stored type. Each weight is read once in a step, so the cache evicts weights first
    (evict_first) and keeps activations, keys and values, which are read again.
    """
    at = rows.to(tl.int64)[:, None] * WIDTH + k[None, :]
    mask = row_mask[:, None] & (k < WIDTH)[None, :]
    return tl.load(w_ptr + at, mask=mask, other=0, eviction_policy="evict_first")


@triton.jit
def decoded(
    words, part, scales_ptr, rows, row_mask, first, BN: tl.constexpr, BK: tl.constexpr,
    K: tl.constexpr, WIDTH: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """float32 [BN, BK]: the weights of code number `part` of each word, for inputs from `first` on. With one scale per
    row and no minimum, the scale is not applied yet. WIDTH: words of a row. CODES: as for `product`.
    """
    BITS: tl.constexpr = CODES[0]
    GROUP: tl.constexpr = CODES[1]
    NUMBERS: tl.constexpr = CODES[2]
    STEP: tl.constexpr = (GROUP | WIDTH | BK) & -(GROUP | WIDTH | BK)  # the largest power of two that divides all
    numbers = code_of(words, part, BITS, NUMBERS == 2)
    if GROUP < K or NUMBERS == 2:
        numbers *= scale_tile(scales_ptr, rows, row_mask, first, 0, BN, BK, K, GROUP, NUMBERS, STEP)
    if NUMBERS == 2:
        numbers += scale_tile(scales_ptr, rows, row_mask, first, 1, BN, BK, K, GROUP, NUMBERS, STEP)
    return numbers


@triton.jit
def added_tile(
    acc, w, begin, mean, rstd,
    scales_ptr, rows, row_mask, x_ptr, addend_ptr, addend_bias_ptr, gain_ptr, shift_ptr, eps, residual_ptr, m, m_mask,
    K: tl.constexpr, WIDTH: tl.constexpr, CODES: tl.constexpr, NORM: tl.constexpr, SHIFT: tl.constexpr,
    ADD: tl.constexpr, ADD_BIAS: tl.constexpr, RESIDUAL: tl.constexpr, WHOLE: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, MP: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """acc plus the products of the tile w, whose first column of each part is `begin`: see `product`. WHOLE: the tile
    has whole rows, whose mean and rstd come from the activations in it.

    One row of activations is multiplied element by element, because 15 of the matrix unit's 16 rows would be padding.
    Each thread adds up the products of one load before it adds them to its sum: a sum per weight of the tile would take
    most of the registers, and with them the loads in flight. More rows go through the matrix unit, in the type DOT.
    """
    BITS: tl.constexpr = CODES[0]
    for part in tl.static_range(1 if BITS == 0 else 32 // BITS):
        column = begin + tl.arange(0, BK)
        k = column + part * WIDTH
        inside = (column < WIDTH) & (k < K)
        mask = m_mask[:, None] & inside[None, :]
        x = load_rows(x_ptr, addend_ptr, addend_bias_ptr, m, k, mask, K, ADD, ADD_BIAS)
        if NORM != "none" and WHOLE:
            mean, rstd = row_moments(x, mask, eps, K, NORM)
        y = normed(x, mean, rstd, gain_ptr, shift_ptr, k, inside, NORM, SHIFT)
        if RESIDUAL != "none":
            if (begin // BK) % tl.num_programs(0) == tl.program_id(0):
                tl.store(residual_ptr + m[:, None] * K + k[None, :], x if RESIDUAL == "sum" else y, mask=mask)
        if BITS == 0:
            numbers = w
        else:
            numbers = decoded(w, part, scales_ptr, rows, row_mask, begin + part * WIDTH, BN, BK, K, WIDTH, CODES)
        if MP == 1:
            products = tl.reshape(numbers.to(tl.float32) * y, (BN, acc.shape[1], BK // acc.shape[1]))
            acc += tl.sum(products, axis=2)
        else:
            acc = tl.dot(numbers.to(DOT), tl.trans(y).to(DOT), acc, input_precision="ieee")
    return acc


@triton.jit
def product(
    w_ptr, scales_ptr, rows, row_mask,
    x_ptr, addend_ptr, addend_bias_ptr, gain_ptr, shift_ptr, eps, residual_ptr, M,
    K: tl.constexpr, CODES: tl.constexpr, NORM: tl.constexpr, SHIFT: tl.constexpr,
    ADD: tl.constexpr, ADD_BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, AHEAD: tl.constexpr, MP: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """norm(x + addend + bias) W^T of the first M rows of x: see `product_of_rows`."""
    m = tl.arange(0, MP)
    return product_of_rows(
        w_ptr, scales_ptr, rows, row_mask,
        x_ptr, addend_ptr, addend_bias_ptr, gain_ptr, shift_ptr, eps, residual_ptr, m, m < M,
        K, CODES, NORM, SHIFT, ADD, ADD_BIAS, RESIDUAL, BN, BK, AHEAD, MP, DOT, PDL,
    )  # fmt: skip


@triton.jit
def product_of_rows(
    w_ptr, scales_ptr, rows, row_mask,
    x_ptr, addend_ptr, addend_bias_ptr, gain_ptr, shift_ptr, eps, residual_ptr, m, m_mask,
    K: tl.constexpr, CODES: tl.constexpr, NORM: tl.constexpr, SHIFT: tl.constexpr,
    ADD: tl.constexpr, ADD_BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, AHEAD: tl.constexpr, MP: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """norm(x + addend + bias) W^T of the rows m [MP] of x, for the `rows` [BN] of W: float32 [BN, MP].

    CODES: (0, 0, 0) for a floating weight [N, K]; else (bits, inputs that share a scale, 1 for a scale or 2 with a
    minimum), and the weight is [N, ceil(K / parts)] words of four 8-bit codes or eight 4-bit codes. Each code of a word
    comes from another part of the row. So code number n of all words of a tile belongs to consecutive inputs, whose
    activations are one contiguous load. RESIDUAL: "sum" or "normed" writes these rows, each program its share; "none"
    writes nothing. AHEAD: 1 or 2 tiles of weights are loaded before they are used, for one row of activations.
    """
    BITS: tl.constexpr = CODES[0]
    PARTS: tl.constexpr = 1 if BITS == 0 else 32 // BITS
    WIDTH: tl.constexpr = (K + PARTS - 1) // PARTS
    LOADED: tl.constexpr = 128 // w_ptr.dtype.element_ty.primitive_bitwidth  # numbers that a thread loads at once
    WHOLE: tl.constexpr = MP == 1 and BITS == 0 and BK >= K
    span = tl.arange(0, BK)
    # The first weights load while the previous kernel ends and the norm's statistics are computed.
    w = weight_tile(w_ptr, rows, span, row_mask, WIDTH)
    if MP == 1 and AHEAD > 1 and BK < WIDTH:
        w_next = weight_tile(w_ptr, rows, BK + span, row_mask, WIDTH)
    wait_for_previous(PDL)
    mean, rstd = m.to(tl.float32) * 0.0, m.to(tl.float32)
    if NORM != "none" and not WHOLE:
        BLOCK: tl.constexpr = 256 if MP > 1 else 1024 if K <= 1024 else 4096 if K <= 4096 else 2048
        mean, rstd = moments(x_ptr, addend_ptr, addend_bias_ptr, eps, m, m_mask, K, NORM, ADD, ADD_BIAS, BLOCK)
    acc = tl.zeros((BN, BK // LOADED if MP == 1 else MP), tl.float32)  # for one row a sum for each load of a thread
    for begin in range(0, WIDTH, BK):
        if MP > 1:  # for a dot, Triton's own pipeline loads ahead
            w = weight_tile(w_ptr, rows, begin + span, row_mask, WIDTH)
        elif BK < WIDTH:
            w_after = weight_tile(w_ptr, rows, begin + AHEAD * BK + span, row_mask, WIDTH)
        acc = added_tile(
            acc, w, begin, mean, rstd,
            scales_ptr, rows, row_mask, x_ptr, addend_ptr, addend_bias_ptr, gain_ptr, shift_ptr, eps, residual_ptr,
            m, m_mask, K, WIDTH, CODES, NORM, SHIFT, ADD, ADD_BIAS, RESIDUAL, WHOLE, BN, BK, MP, DOT,
        )  # fmt: skip
        if MP == 1 and BK < WIDTH:
            if AHEAD > 1:
                w = w_next
                w_next = w_after
            else:
                w = w_after
    if MP == 1:
        acc = tl.sum(acc, axis=1, keep_dims=True)
    if BITS != 0 and CODES[1] >= K and CODES[2] == 1:
        acc *= tl.load(scales_ptr + rows, mask=row_mask, other=0.0).to(tl.float32)[:, None]
    return acc
