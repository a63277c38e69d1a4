"""Codes of 8 and 4 bits: their error, numbers without a scale, and chunks of a flattened matrix."""

from itertools import product

import pytest
import torch
from helpers.kernels.ops import DTYPES, Draw

from labkit.kernels import build, codes
from labkit.kernels.codes import (
    FINEST,
    codes_of,
    cut_groups,
    flat_scales,
    group_size,
    pack_words,
    quantize,
    unpack_words,
)
from labkit.kernels.types import Linear

BITS = [8, 4]
KINDS = pytest.mark.parametrize("asymmetric", [False, True], ids=["symmetric", "asymmetric"])


def restored(weight: torch.Tensor, group: int, bits: int, asymmetric: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The matrix that the codes represent, and the step of each of its numbers."""
    codes, scales = quantize(weight, group, bits=bits, asymmetric=asymmetric)
    assert -(1 << bits - 1) <= int(codes.amin()) <= int(codes.amax()) < 1 << bits - 1
    steps = scales[:, :, 0].float().abs().repeat_interleave(group, dim=1)[:, : weight.shape[1]]
    outputs, inputs = weight.shape
    return Linear(codes, None, outputs, inputs, "rows", scales, group, bits).floats(), steps


@KINDS
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("inputs", "groups"), [(7, 1), (100, 2), (128, 2), (100, 5)])
def test_numbers_of_a_type_are_the_float32_numbers_rounded_once(
    inputs: int, groups: int, bits: int, asymmetric: bool
) -> None:
    group = group_size(inputs, groups, bits)
    codes, scales = quantize(Draw().normal(33, inputs), group, bits=bits, asymmetric=asymmetric)
    linear = Linear(codes, None, 33, inputs, "rows", scales, group, bits)
    spread = scales.float().repeat_interleave(group, dim=1)[:, :inputs]
    wide = (
        spread[:, :, 0] * (codes.float() + (1 << bits - 1)) + spread[:, :, 1] if asymmetric else spread[:, :, 0] * codes
    )
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(linear.floats(dtype), wide.to(dtype))


@KINDS
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.usefixtures("isa")
def test_cpp_gives_the_codes_and_scales_of_torch(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, bits: int, asymmetric: bool
) -> None:
    """Bit by bit, for numbers whose scales are subnormal in float16 too, and where several are the largest."""
    build.any_library()
    draw = Draw()
    for (inputs, group), size in product(((64, 32), (100, 32), (37, 37), (256, 128)), (1.0, 1e-6, 3e3, 0.0)):
        weight = (draw.normal(40, 2 * inputs) * size).to(dtype)[:, ::2]
        weight[0] = (weight[0] / size).round() if size else 0.0
        actual = quantize(weight, group, bits=bits, asymmetric=asymmetric)
        with monkeypatch.context() as patch:
            patch.setattr(codes, "_in_cpp", lambda weight: False)
            expected = quantize(weight, group, bits=bits, asymmetric=asymmetric)
        assert all(map(torch.equal, actual, expected))


@KINDS
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("groups", [1, 2, 5, 64])
@pytest.mark.parametrize("inputs", [1, 7, 64, 100])
def test_a_weight_is_within_half_a_step(inputs: int, groups: int, bits: int, asymmetric: bool) -> None:
    """With 4 bits and no minimum, the negative of the largest number in a group is off by a whole step."""
    weight = Draw().normal(33, inputs)
    weight[3] = 0.0
    actual, steps = restored(weight, group_size(inputs, groups, bits), bits, asymmetric)
    largest_error = 1.0 if bits == 4 and not asymmetric else 0.5
    assert ((actual - weight).abs() <= largest_error * 1.002 * steps + 1e-7).all()


@KINDS
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("value", [0.0, 0.1, -3.0, 1e-9, 60000.0])
def test_a_group_of_equal_numbers_stays_what_it_is(value: float, bits: int, asymmetric: bool) -> None:
    actual, _ = restored(torch.full((2, 64), value), 32, bits, asymmetric)
    assert actual.isfinite().all()
    assert ((actual - value).abs() <= abs(value) * 2**-10 + 6e-8).all()


@KINDS
def test_numbers_without_a_scale_are_refused(asymmetric: bool) -> None:
    weight = torch.full((2, 64), 1e30)
    weight[0, 0] = -1e30
    with pytest.raises(ValueError, match=r"got weights up to 1e\+30; their scales do not fit into float16"):
        quantize(weight, 32, asymmetric=asymmetric)


def test_a_padded_row_has_the_groups_of_its_own_numbers() -> None:
    """The numbers are far from 0, and padding must not pull the minimum to 0."""
    weight = 10 + Draw().normal(4, 70) / 100
    actual, _ = restored(weight, 64, 4, True)
    assert (actual - weight).abs().max() < 0.01


@pytest.mark.parametrize("groups", [1, 3, 4, 12, 24])
def test_flat_groups_are_equal_chunks_of_the_flattened_matrix(groups: int) -> None:
    """Compares with the arithmetic of DeepSpeed's WeightQuantization, whose scale is 2^bits / (2 max + 1e-5)."""
    weight = Draw().normal(12, 64)
    scales, group = flat_scales(weight, groups)
    chunks = weight.view(groups, -1)
    expected = (2 * chunks.abs().amax(dim=1) + 1e-5) / 256
    actual = scales[:, :, 0].float().repeat_interleave(group, dim=1)[:, :64].reshape(groups, -1)
    assert torch.allclose(actual, expected[:, None].expand_as(actual), rtol=1e-3)
    codes = codes_of(weight, scales, group)
    assert (codes.view(groups, -1) - chunks / expected[:, None]).abs().max() < 1.1


@pytest.mark.parametrize("groups", [5, 36])
def test_flat_groups_that_cut_rows_anywhere_are_refused(groups: int) -> None:
    with pytest.raises(ValueError, match=f"{groups} groups do not divide the 12 rows of a matrix; expected a divisor"):
        flat_scales(torch.ones(12, 64), groups)


@pytest.mark.parametrize("bits", BITS)
def test_a_cut_within_a_group_gets_groups_that_fit(bits: int) -> None:
    finest = FINEST[bits]
    assert cut_groups(2 * finest, 6 * finest, 4 * finest, 3, bits) == ([2 * finest, 4 * finest], 2 * finest)
    with pytest.raises(ValueError, match=f"groups of {4 * finest} inputs cannot be cut at input {finest + 1}"):
        cut_groups(finest + 1, 6 * finest, 4 * finest, 3, bits)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("inputs", [1, 8, 21, 64])
def test_words_give_their_codes_back(inputs: int, bits: int) -> None:
    codes = torch.randint(-(1 << bits - 1), 1 << bits - 1, (3, inputs)).to(torch.int8)
    assert torch.equal(unpack_words(pack_words(codes, bits), inputs, bits), codes)
