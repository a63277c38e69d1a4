"""The small-batch GEMM and its packed layout."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.kernels.ops import DTYPES, QUANTISED, WEIGHTS, Draw, assert_near, tolerance
from torch.nn import functional as F

from labkit.kernels import gemm
from labkit.kernels.gemm import interleave_gate, pack, pack_words, packed, packed_shape, unpack, unpack_rows
from labkit.kernels.types import Linear
from labkit.system.errors import UserError

SHAPES = [(1, 1), (33, 63), (60, 60), (64, 128), (131, 33), (35, 300), (96, 513)]  # outputs, inputs
ROWS = [1, 2, 3, 5, 12, 13, 33, 64, 80]
pytestmark = pytest.mark.usefixtures("poisoned")


def assert_cpp_equals_reference(draw: Draw, shape: tuple[int, int], bias: bool) -> None:
    plain, panels = draw.linear(*shape, bias=bias)
    for rows in ROWS:
        x = draw.normal(rows, shape[1])
        expected = gemm(x, plain, impl="reference")
        magnitudes = F.linear(x.abs(), plain.floats().abs(), None if plain.bias is None else plain.bias.abs())
        # With many rows, scaled weights are rounded to bfloat16 as well.
        assert_near(gemm(x, panels, impl="cpp"), expected, magnitudes, tolerance(draw.dtype, 1 if rows < 13 else 2))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
@pytest.mark.parametrize("dtype", WEIGHTS.values(), ids=WEIGHTS)
def test_cpp_equals_reference_for_any_number_of_rows(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    assert_cpp_equals_reference(Draw(dtype), shape, bias=True)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("storage", QUANTISED.values(), ids=QUANTISED)
def test_cpp_equals_reference_however_weights_are_stored(storage: dict[str, Any]) -> None:
    for shape in SHAPES:
        assert_cpp_equals_reference(Draw(torch.int8, **storage), shape, bias=False)


# Numbers of rows among which a row keeps its bits on every processor. AMX takes five bf16 rows and more, and codes are
# widened for three rows and more where the processor has narrow vectors.
BESIDE = {torch.float32: 80, torch.float16: 80, torch.bfloat16: 4, torch.int8: 2}


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(
    ("dtype", "storage"),
    [*((dtype, {}) for dtype in WEIGHTS.values()), *((torch.int8, storage) for storage in QUANTISED.values())],
    ids=[*WEIGHTS, *QUANTISED],
)
def test_a_row_does_not_depend_on_the_rows_beside_it(dtype: torch.dtype, storage: dict[str, Any]) -> None:
    draw = Draw(dtype, **storage)
    for shape in SHAPES:
        _, panels = draw.linear(*shape)
        x = draw.normal(BESIDE[dtype], shape[1])
        together = gemm(x, panels, impl="cpp")
        for rows in (rows for rows in ROWS if rows < len(x)):
            assert torch.equal(gemm(x[:rows], panels, impl="cpp"), together[:rows])
            assert torch.equal(gemm(x[-rows:], panels, impl="cpp"), together[-rows:])


@pytest.mark.parametrize("shape", [*SHAPES, (50, 7)], ids=lambda shape: f"{shape[0]}x{shape[1]}")
@pytest.mark.parametrize("dtype", WEIGHTS.values(), ids=WEIGHTS)
def test_unpacking_gives_the_packed_rows_back(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    order = torch.randperm(shape[0], generator=torch.Generator().manual_seed(1))
    for storage in QUANTISED.values() if dtype == torch.int8 else ({},):
        plain, panels = Draw(dtype, **storage).linear(*shape)
        stored = torch.uint8 if storage.get("bits") == 4 else dtype
        assert panels.weight.shape == packed_shape(*shape, stored)
        assert panels.weight.dtype == stored
        for linear in (panels, packed(plain, "triton")):
            assert torch.equal(unpack_rows(linear, order), plain.floats()[order])


FLOAT = torch.ones(3, 5)
CODES = torch.ones(40, 5, dtype=torch.int8)
LAYOUT_MISUSES: list[tuple[Callable[[], object], str]] = [
    (lambda: pack(CODES.long(), bits=4), r"weight: expected int8 \[outputs, inputs\], got torch\.int64 \[40, 5\]"),
    (lambda: pack(FLOAT, bits=4), r"weight: expected int8 .*, got torch\.float32"),
    (lambda: pack(CODES * 8, bits=4), r"weight: got codes from 8 to 8, expected -8 to 7 for 4 bits; gemm\.quantize"),
    (lambda: pack(CODES.long()), r"weight: expected float32 or bfloat16 or float16 or int8 .*, got torch\.int64"),
    (lambda: pack(CODES, bits=3), r"got bits = 3, expected 8 or 4"),
    (lambda: pack(FLOAT[0]), r"weight: expected .* \[outputs, inputs\], got torch\.float32 \[5\]"),
    (lambda: pack([[1.0]]), r"weight: expected a tensor, got list"),  # type: ignore[arg-type]
    (
        lambda: pack(FLOAT, FLOAT[:2]),
        r"second: expected \[3, 5\], as the first matrix is, got \[2, 5\]",
    ),
    (lambda: pack(FLOAT, FLOAT.half()), r"second: expected float32 .*, got torch\.float16"),
    (
        lambda: pack(FLOAT, out=torch.empty(3)),
        r"out: expected contiguous float32 \[1, 5, 32\], got .* \[3\]",
    ),
    (
        lambda: pack(CODES, out=torch.empty(2, 2, 32, 4)),
        r"out: expected contiguous int8 \[2, 2, 32, 4\], got .*float32",
    ),
    (lambda: pack(CODES, out=torch.empty(2, 2, 32, 4, dtype=torch.int8), bits=4), r"out: expected contiguous uint8 \["),
    (lambda: pack_words(CODES * 9, 4), r"codes: got codes from 9 to 9, expected -8 to 7"),
    (lambda: pack_words(FLOAT), r"codes: expected int8 \[outputs, inputs\], got torch\.float32"),
    (
        lambda: packed(Linear(CODES.long(), None, 40, 5, "rows")),
        r"linear\.weight: expected .*, got torch\.int64",
    ),
    (lambda: packed(Linear(FLOAT, None, 3, 5, "panels")), "take float32 weights with layout 'rows', got 'panels'"),
    (lambda: packed(Linear(FLOAT, None, 3, 5, "rows"), "nonsense"), "packed: unknown impl 'nonsense'"),
]


@pytest.mark.parametrize(("call", "expected"), LAYOUT_MISUSES, ids=[case[1][:30] for case in LAYOUT_MISUSES])
def test_matrices_that_cannot_be_laid_out_are_refused(call: Callable[[], object], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        call()


@pytest.mark.parametrize("layout", ["rows", "panels", "words"])
def test_codes_out_of_range_and_rows_beyond_the_matrix_are_refused(layout: str) -> None:
    plain, panels = Draw(torch.int8, bits=4, group=32).linear(40, 64)
    linear = {"rows": plain, "panels": panels, "words": packed(plain, "triton")}[layout]
    assert torch.equal(unpack_rows(linear, torch.tensor([39, 0])), plain.floats()[[39, 0]])
    for row in (-1, 40, 63, 10**6):
        with pytest.raises(UserError, match=rf"rows: got 0 to {row}|rows: got {row} to 0"):
            unpack_rows(linear, torch.tensor([0, row]))
    with pytest.raises(UserError, match=r"rows: expected contiguous int64 or int32 \[any\], got torch\.bool"):
        unpack_rows(linear, torch.ones(40, dtype=torch.bool))
    with pytest.raises(UserError, match=r"linear\.weight: got codes from .* for 4 bits"):
        packed(replace(plain, weight=plain.weight * 0 + 9), "triton")


def test_a_transposed_matrix_is_packed_like_its_copy() -> None:
    weight = torch.randn(5, 40).T
    assert torch.equal(pack(weight), pack(weight.contiguous()))


def test_activations_that_may_be_rounded_lose_a_hundredth() -> None:
    plain, panels = Draw(torch.int8, bits=4, group=32).linear(64, 1024, bias=False)
    x = Draw().normal(2, 1024)
    expected = x.double() @ plain.floats().double().T
    errors = [
        float((gemm(x, replace(panels, activation_bits=bits), impl="cpp").double() - expected).norm() / expected.norm())
        for bits in (16, 8)
    ]
    assert errors[0] < 5e-3
    assert errors[1] < 2e-2


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rows", [1, 7])
def test_codes_are_multiplied_with_all_that_activations_have(rows: int, bits: int) -> None:
    """Error compared with float64, for rows that bfloat16 represents exactly and that have some far larger activations.
    With one byte per activation the error would be a hundred times as large.
    """
    plain, panels = Draw(torch.int8, bits=bits, groups=4).linear(64, 1024, bias=False)
    x = Draw().normal(rows, 1024)
    x[:, ::97] *= 50
    x = x.bfloat16().float()
    expected = x.double() @ plain.floats().double().T
    relative_error = (
        gemm(x, panels, impl="cpp").double() - expected
    ).square().mean().sqrt() / expected.square().mean().sqrt()
    assert relative_error < 1e-4


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_stays_so_and_alone(value: float) -> None:
    draws = (Draw(torch.bfloat16), Draw(torch.int8), Draw(torch.int8, bits=4, group=32, asymmetric=True))
    for _, panels in (draw.linear(33, 300) for draw in draws):
        x = Draw().normal(3, 300)
        x[1, 200] = value
        finite = gemm(x, panels, impl="cpp").isfinite()
        assert finite[[0, 2]].all()
        assert not finite[1].any()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_packing_pads_with_zeros(dtype: torch.dtype) -> None:
    panels = pack(torch.ones(33, 63, dtype=dtype))
    assert panels.float().sum() == 33 * 63


def test_packing_into_given_memory_fills_it() -> None:
    weight = Draw().normal(40, 21)
    out = torch.empty(packed_shape(40, 21, weight.dtype))
    assert pack(weight, out=out) is out
    assert torch.equal(out, pack(weight))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [*DTYPES.values(), torch.int8], ids=[*DTYPES, "int8"])
def test_all_strides_are_packed_alike(dtype: torch.dtype) -> None:
    weight = (Draw().normal(2 * 45, 3 * 70) * 50).to(dtype)
    for view in (weight, weight[::2], weight[:, ::3], weight[7:40, 5:60], weight.T, weight[:1], weight[:, :1]):
        panels = pack(view)
        assert torch.equal(unpack(panels)[: len(view), : view.shape[1]], view)
        assert panels.count_nonzero() == view.count_nonzero()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [*DTYPES.values(), torch.int8], ids=[*DTYPES, "int8"])
@pytest.mark.parametrize("inner", [1, 16, 20, 100])
def test_two_matrices_are_packed_like_their_interleaved_rows(inner: int, dtype: torch.dtype) -> None:
    both = (Draw().normal(2 * inner, 70) * 3).to(dtype)
    for gate_up in (both, both.T.contiguous().T):
        gate, up = gate_up.chunk(2)
        assert torch.equal(pack(gate, up), pack(interleave_gate(gate_up)))
        assert torch.equal(pack(gate, up.contiguous()), pack(interleave_gate(gate_up)))
    if dtype == torch.int8:
        nibbles = both.clamp(-8, 7)
        assert torch.equal(pack(*nibbles.chunk(2), bits=4), pack(interleave_gate(nibbles), bits=4))


@pytest.mark.parametrize("inner", [1, 16, 20, 100])
def test_interleaved_gate_and_up_rows_meet_in_one_block(inner: int) -> None:
    gate_up = Draw().normal(2 * inner, 3)
    mixed = interleave_gate(gate_up).unflatten(0, (-1, 2, 16))
    gate, up = (mixed[:, half].flatten(0, 1) for half in (0, 1))
    assert torch.equal(torch.cat((gate[:inner], up[:inner])), gate_up)
    assert not gate[inner:].any()
    assert not up[inner:].any()


def test_an_unknown_impl_is_refused_with_the_known_ones() -> None:
    plain, _ = Draw().linear(3, 4)
    with pytest.raises(ValueError, match="unknown impl 'cuda'; expected one of cpp, reference"):
        gemm(torch.zeros(1, 4), plain, impl="cuda")


@pytest.mark.parametrize(
    "x", [torch.zeros(2, 5), torch.zeros(4), torch.zeros(2, 4, dtype=torch.float64), torch.zeros(4, 2).t()]
)
def test_rows_of_another_kind_are_refused(x: torch.Tensor) -> None:
    plain, _ = Draw().linear(3, 4)
    with pytest.raises(ValueError, match=r"x: expected contiguous float32 \[rows, 4\], got"):
        gemm(x, plain, impl="reference")


def test_the_kernels_refuse_weights_that_are_not_packed() -> None:
    plain, _ = Draw().linear(3, 4)
    with pytest.raises(ValueError, match="layout 'panels', got 'rows'; use gemm"):
        gemm(torch.zeros(1, 4), plain, impl="cpp")


def test_a_weight_type_without_kernels_is_refused() -> None:
    weight = torch.zeros(1, 4, 32, dtype=torch.float64)
    with pytest.raises(
        ValueError, match=r"weight: expected contiguous float32 or bfloat16 or float16 .* got torch.float64"
    ):
        gemm(torch.zeros(1, 4), Linear(weight, None, 3, 4, "panels"), impl="cpp")
