"""Quantised matrices: codes of 8 or 4 bits in groups along the inputs, each group with a scale or a scale and a
minimum, and how the codes are laid out for the kernels. `types.Linear` says what a code stands for.
"""

import ctypes
from ctypes import byref
from math import gcd

import torch
from torch import Tensor
from torch.nn import functional as F

from labkit.system.errors import UserError
from labkit.system.rounding import BLOCK, ceil_div, round_up

from . import build
from .build import INT, LONG, POINTER, fields, same_in_cpp

build.declare("labkit_quantise", POINTER, INT, INT, INT)

FINEST = {8: 4, 4: 32}  # by bits: the inputs of a group are a multiple of this number
DEPTH = {8: 4, 4: 64}  # by bits: inputs that are packed together; rows are padded to them
HALF = DEPTH[4] // 2  # of a span of 4-bit codes: the first half is in the low nibbles, the second in the high nibbles
WORD = {8: 4, 4: 8}  # codes in a word of Triton's
PACKED = {8: torch.int8, 4: torch.uint8}  # how packed codes are stored
LANES = {torch.bfloat16: 2, torch.int8: 4}  # adjacent inputs of a row in a packed block
QUANTIZED_AT_ONCE = 128  # rows; they bound the memory that quantising takes besides its result
IN_CPP = (torch.float32, torch.bfloat16, torch.float16)  # what the C++ kernels quantise
SMALLEST_NORMAL = 2.0**-14  # of float16
SCALE_BYTES = 2  # float16, as is a minimum


def group_size(inputs: int, groups: int, bits: int = 8) -> int:
    """Number of inputs that share a scale when a row is cut into `groups`: a multiple of 4 (8 bits) or 32 (4 bits). So
    the last group may be smaller, or missing.
    """
    finest = DEPTH[bits] if groups == 1 else FINEST[bits]
    return ceil_div(inputs, groups * finest) * finest


def quantize(weight: Tensor, group: int, *, bits: int = 8, asymmetric: bool = False) -> tuple[Tensor, Tensor]:
    """[outputs, inputs] -> codes int8 of that shape, scales float16 [outputs, groups, 1 or 2]; see `types.Linear`."""
    scales = scales_of(weight, group, bits=bits, asymmetric=asymmetric)
    return codes_of(weight, scales, group, bits=bits), scales


def scales_of(weight: Tensor, group: int, *, bits: int = 8, asymmetric: bool = False) -> Tensor:
    """The scales [outputs, groups, 1 or 2] of a matrix whose groups consist of `group` inputs.

    Symmetric: with 8 bits a group's scale is its largest magnitude / 127. With 4 bits the number of largest magnitude
    gets the code -8, as in GGUF's Q4_0. So a scale may be negative, and a number of the same magnitude and the other
    sign has an error of a step. Asymmetric: the codes reach from the smallest to the largest number. All other errors
    are at most half a step, plus the float16 rounding of the minimum. A group of equal numbers is described by its
    minimum alone.

    Raises UserError for numbers that are too large for float16 scales.
    """
    if _in_cpp(weight):
        scales = torch.empty(len(weight), ceil_div(weight.shape[1], group), 2 if asymmetric else 1, dtype=torch.float16)
        _quantise(weight, group, scales, bits=bits, asymmetric=asymmetric)
    else:
        scales = torch.cat([
            (_asymmetric if asymmetric else _symmetric)(_grouped(rows, group), bits)
            for rows in weight.split(QUANTIZED_AT_ONCE)
        ])  # fmt: skip
    if not scales.isfinite().all():
        raise UserError(
            f"got weights up to {float(weight.abs().max()):g}; their scales do not fit into float16, so use a floating "
            "dtype for them"
        )
    return scales


def flat_scales(weight: Tensor, groups: int, *, bits: int = 8) -> tuple[Tensor, int]:
    """Scales as in DeepSpeed's MoQ, whose groups are equal chunks of the flattened matrix. Returns (scales [outputs,
    groups of a row, 1], number of inputs that share one).

    A scale is (2 max + 1e-5) / 2^bits, so the largest number of a chunk may have an error of a step. Raises UserError
    for chunks that are neither whole rows nor equal parts of rows.
    """
    outputs, inputs = weight.shape
    check_flat(outputs, inputs, groups, bits)
    largest = torch.cat([rows.abs().amax(dim=1) for rows in _flat_rows(weight, groups)]).float()
    if groups < outputs:
        largest = largest.view(groups, -1).amax(dim=1).repeat_interleave(outputs // groups)
    scales = _half((2 * largest + 1e-5) / (1 << bits)).view(outputs, -1, 1)
    return scales, group_size(inputs, scales.shape[1], bits)


def check_flat(outputs: int, inputs: int, groups: int, bits: int = 8) -> None:
    """Raises UserError unless `groups` chunks of a flattened matrix are whole rows or parts that kernels support."""
    in_row, rest = divmod(groups, outputs)
    if outputs % groups == 0 or (rest == 0 and inputs % (in_row * FINEST[bits]) == 0):
        return
    divisors = [count for count in range(1, outputs + 1) if outputs % count == 0]
    nearest = sorted(sorted(divisors, key=lambda count: abs(count - groups))[:4])
    raise UserError(
        f"{groups} groups do not divide the {outputs} rows of a matrix; expected a divisor of them, such as "
        f"{', '.join(map(str, nearest))}"
    )


def _flat_rows(weight: Tensor, groups: int) -> tuple[Tensor, ...]:
    """The matrix as rows that each lie within one chunk, some at a time."""
    in_row = max(1, groups // weight.shape[0])
    return tuple(rows.reshape(len(rows) * in_row, -1) for rows in weight.split(QUANTIZED_AT_ONCE))


def codes_of(weight: Tensor, scales: Tensor, group: int, *, bits: int = 8) -> Tensor:
    """The nearest codes, int8 [outputs, inputs], of a matrix with these scales."""
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    if _in_cpp(weight):
        _quantise(weight, group, scales.contiguous(), codes, bits=bits, asymmetric=scales.shape[2] == 2)
        return codes
    lowest, steps = -(1 << bits - 1), (1 << bits) - 1
    for begin in range(0, len(weight), QUANTIZED_AT_ONCE):
        rows = slice(begin, begin + QUANTIZED_AT_ONCE)
        numbers = _grouped(weight[rows], group)
        scale, *minimum = scales[rows].float()[..., None].unbind(2)
        if minimum:
            numbers = numbers - minimum[0]
        numbers = numbers.div_(torch.where(scale != 0, scale, 1.0)).round_()
        numbers = numbers.clamp_(0, steps).add_(lowest) if minimum else numbers.clamp_(lowest, lowest + steps)
        codes[rows] = numbers.flatten(1)[:, : weight.shape[1]]
    return codes


@build.mirrors("Quantising")
class CQuantising(ctypes.Structure):
    """The arguments of `labkit_quantise`, see quantise.cpp."""

    _fields_ = fields(
        (POINTER, "rows"),
        (LONG, "outputs inputs row_stride group"),
        (INT, "bits asymmetric"),
        (POINTER, "scales codes"),
    )


def _in_cpp(weight: Tensor) -> bool:
    """Whether the C++ kernels quantise a matrix: on a CPU, if they are in use."""
    return weight.device.type == "cpu" and weight.dtype in IN_CPP and build.in_use_already() is not None


def _quantise(
    weight: Tensor, group: int, scales: Tensor, codes: Tensor | None = None, *, bits: int, asymmetric: bool
) -> None:
    """Writes the scales of a matrix; with `codes` its codes by these scales."""
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    outputs, inputs = weight.shape
    stored = weight.data_ptr(), outputs, inputs, weight.stride(0), group
    call = CQuantising(*stored, bits, asymmetric, scales.data_ptr(), None if codes is None else codes.data_ptr())
    half, threads = weight.dtype == torch.float16, torch.get_num_threads()
    build.any_library().labkit_quantise(byref(call), weight.element_size(), half, threads)


def _grouped(rows: Tensor, group: int) -> Tensor:
    """A float copy [rows, groups, group]. A short last group is padded with its first number."""
    missing = -rows.shape[1] % group
    numbers = F.pad(rows.float(), (0, missing)) if missing else rows.to(torch.float32, copy=True)
    grouped = numbers.unflatten(1, (-1, group))
    if missing:
        grouped[:, -1, group - missing :] = grouped[:, -1, :1]
    return grouped


def _symmetric(grouped: Tensor, bits: int) -> Tensor:
    """[rows, groups, group] -> scales [rows, groups, 1]."""
    largest = grouped.gather(2, grouped.abs().argmax(dim=2, keepdim=True))
    return _half(largest / -8 if bits == 4 else largest.abs() / 127)


def _asymmetric(grouped: Tensor, bits: int) -> Tensor:
    """[rows, groups, group] -> scales and minima [rows, groups, 2]."""
    low, high = torch.aminmax(grouped, dim=2)
    minimum = low.half()  # rounded down, so that the codes reach every number
    minimum = torch.where(minimum.float() > low, torch.nextafter(minimum, minimum.new_tensor(-torch.inf)), minimum)
    return torch.stack((_half((high - minimum.float()) / ((1 << bits) - 1)), minimum), dim=2)


def _half(scales: Tensor) -> Tensor:
    """Rounds scales to float16: to the nearest number, but away from zero among the subnormal numbers, which are
    coarse. So the codes reach the largest number, and no scale becomes 0.
    """
    rounded = scales.half()
    short = (rounded.float().abs() < scales.abs()) & (rounded.abs() < SMALLEST_NORMAL)
    return torch.where(short, torch.nextafter(rounded, torch.copysign(rounded.new_tensor(torch.inf), rounded)), rounded)


def cut_groups(begin: int, end: int, group: int, groups: int, bits: int = 8) -> tuple[list[int], int]:
    """Groups of the inputs [begin, end) of rows that have `groups` scales for `group` inputs each. Returns (positions
    in the whole row where the groups of the part begin, their size).

    A part that begins within a group gets groups so small that each has one scale. Raises ValueError if they would be
    smaller than the kernels support.
    """
    if groups == 1:
        return [begin], group_size(end - begin, 1, bits)
    size = gcd(group, begin)
    if size % FINEST[bits]:
        raise UserError(
            f"groups of {group} inputs cannot be cut at input {begin}, between two ranks; expected a multiple of "
            f"{FINEST[bits]}: use one group for a whole row, or a tp_size that cuts elsewhere"
        )
    return list(range(begin, end, size)), size


def packed_shape(outputs: int, inputs: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Shape of a packed [outputs, inputs] matrix: [blocks, K, 32], or [blocks, K / L, 32, L] with L adjacent inputs and
    K padded to whole L. L is 2 for bf16 and 4 for int8. Codes of 4 bits are uint8 [blocks, K / 64, 8, 32, 4].
    """
    blocks, lanes = ceil_div(outputs, BLOCK), LANES.get(dtype, 1)
    if dtype == torch.uint8:
        return (blocks, ceil_div(inputs, DEPTH[4]), HALF // 4, BLOCK, 4)
    return (blocks, inputs, BLOCK) if lanes == 1 else (blocks, ceil_div(inputs, lanes), BLOCK, lanes)


def row_stride(columns: int) -> int:
    """Numbers from one row of activations to the next in the buffers of a step."""
    return round_up(columns, BLOCK) + BLOCK // 2


same_in_cpp(
    {
        "kBlock": BLOCK,
        "kQuad": DEPTH[8],
        "kSpan": DEPTH[4],
        "kHalf": HALF,
        "kLanesPerK<bf16>": LANES[torch.bfloat16],
        "kLanesPerK<int8_t>": LANES[torch.int8],
        "row_stride(33)": row_stride(33),
    }
)


def pack_scales(scales: Tensor) -> Tensor:
    """[outputs, groups, 1 or 2] -> [blocks, groups, 1 or 2, 32], zero-padded."""
    padded = F.pad(scales, (0, 0, 0, 0, 0, -len(scales) % BLOCK))
    return padded.unflatten(0, (-1, BLOCK)).permute(0, 2, 3, 1).contiguous()


def unpack_scales(packed: Tensor) -> Tensor:
    """The inverse of `pack_scales`: [blocks * 32, groups, 1 or 2], padding included."""
    return packed.permute(0, 3, 1, 2).flatten(0, 1)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """The codes int8 [blocks * 32, K] of panels of 4-bit codes, uint8 [blocks, K / 64, 8, 32, 4].

    A span of 64 inputs has 8 quads of 4 bytes. Byte j of quad q has input 4 q + j in its low nibble and input 32 + 4 q
    + j in its high nibble, both as code + 8. So a kernel extracts either half of a span with one mask.
    """
    halves = torch.stack((packed & 15, packed >> 4), dim=2).view(torch.int8) - 8  # [blocks, spans, 2, 8, 32, 4]
    return halves.permute(0, 4, 1, 2, 3, 5).flatten(2).flatten(0, 1)


def pack_words(codes: Tensor, bits: int = 8) -> Tensor:
    """int8 [outputs, inputs] -> int8 [outputs, words, 4]: words of four 8-bit codes or eight 4-bit
    codes, one from each quarter or eighth of a row. With 4 bits, byte j holds code j (low) and code 4 + j, each + 8.
    """
    parts = WORD[bits]
    words = F.pad(codes, (0, -codes.shape[1] % parts)).unflatten(1, (parts, -1)).transpose(1, 2)
    if bits == 4:
        low, high = (words + 8).view(torch.uint8).unflatten(2, (2, 4)).unbind(2)
        words = (low | high << 4).view(torch.int8)
    return words.clone(memory_format=torch.contiguous_format)


def unpack_words(words: Tensor, inputs: int, bits: int = 8) -> Tensor:
    """The inverse of `pack_words`: int8 [outputs, inputs]."""
    if bits == 4:
        stored = words.view(torch.uint8)
        words = torch.cat((stored & 15, stored >> 4), dim=2).view(torch.int8) - 8
    return words.transpose(1, 2).flatten(1)[:, :inputs]
