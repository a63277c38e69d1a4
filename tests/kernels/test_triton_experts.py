"""Mixtures of experts in Triton's interpreter, compared with their references.

There are three kinds of blocks: of one choice for one row, of 16 choices, and of 64 for many rows of few experts.
"""

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.kernels.gpus import INTERPRETED
from helpers.kernels.ops import QUANTISED, WEIGHTS, Draw, distance
from helpers.sweeps import crossed, swept
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from labkit.kernels import ExpertMlps, experts, gpu
from labkit.kernels.experts.triton_impl import blocks_of
from labkit.kernels.experts.triton_impl import experts as fused_experts
from labkit.kernels.gemm import packed
from labkit.kernels.shapes import TOLERANCES
from labkit.kernels.tuned import Tile
from labkit.kernels.types import NO_NORM, Linear, MlpWeights
from labkit.system.errors import UserError

HIDDEN, INNER, OUTPUTS, EXPERTS = 63, 50, 70, 5
SIZES = ((1, 1), (1, 4), (3, 2), (17, 5), (70, 2))  # rows, choices of a row
pytestmark = [pytest.mark.usefixtures("poisoned"), *INTERPRETED]


def mixtures(
    draw: Draw, count: int = EXPERTS, *, gated: bool = True, bias: bool = True, activation: str = "silu"
) -> tuple[ExpertMlps, ExpertMlps]:
    """The same experts as rows and for Triton."""
    ups = [draw.linear(INNER, HIDDEN, gated=gated, bias=bias)[0] for _ in range(count)]
    downs = [draw.linear(OUTPUTS, INNER, bias=bias)[0] for _ in range(count)]
    regions = tuple(MlpWeights(NO_NORM, up, activation, gated) for up in ups)
    on_gpu = tuple(replace(region, up=packed(region.up, "triton")) for region in regions)
    return ExpertMlps(regions, tuple(downs)), ExpertMlps(on_gpu, tuple(packed(down, "triton") for down in downs))


def chosen_of(rows: int, choices: int, count: int = EXPERTS) -> Tensor:
    """Different experts of each row; some choices stand for none."""
    generator = torch.Generator().manual_seed(rows)
    return torch.stack([torch.randperm(count + 1, generator=generator)[:choices] for _ in range(rows)])


def check(draw: Draw, mixture: tuple[ExpertMlps, ExpertMlps], sizes: tuple[tuple[int, int], ...] = SIZES) -> None:
    plain, on_gpu = mixture
    for rows, choices in sizes:
        chosen = chosen_of(rows, choices, len(plain.outs))
        hidden, shares = draw.normal(rows, HIDDEN), draw.normal(rows, choices)
        expected = experts(hidden, chosen, shares, plain, impl="reference")
        actual = experts(hidden, chosen, shares, on_gpu, impl="triton")
        assert distance(actual, expected) <= TOLERANCES[draw.dtype]


@pytest.mark.parametrize(("dtype", "gated"), crossed(WEIGHTS, {"gated": True, "plain": False}))
def test_experts_equal_the_reference(dtype: torch.dtype, gated: bool) -> None:
    draw = Draw(dtype)
    check(draw, mixtures(draw, gated=gated))


@pytest.mark.parametrize("stored", swept(QUANTISED, ["int4", "int8-64-asymmetric", "int4-32-asymmetric"]))
def test_experts_of_each_kind_of_codes_equal_the_reference(stored: dict[str, Any]) -> None:
    draw = Draw(torch.int8, **stored)
    check(draw, mixtures(draw, bias=False), ((1, 4), (3, 2), (70, 2)))


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu", "relu_squared"])
def test_other_activations_and_many_experts_equal_the_reference(activation: str) -> None:
    draw = Draw()
    check(draw, mixtures(draw, 37, activation=activation), ((1, 37), (3, 2), (17, 5)))


@pytest.mark.parametrize("tile", swept({"16x16": Tile(16, 16, stages=2), "32x64": Tile(32, 64)}, ["16x16"]))
def test_experts_in_several_tiles_equal_the_reference(tile: Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "default_tile", lambda *_: tile)
    for draw in (Draw(), Draw(torch.int8, bits=4, group=32)):
        check(draw, mixtures(draw), ((1, 4), (17, 5)))


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_any_choices_equal_the_reference(data: st.DataObject) -> None:
    """Experts may be chosen by all rows, by none, and several times by one row."""
    count, rows = data.draw(st.sampled_from([1, 2, 9])), data.draw(st.sampled_from([1, 2, 16, 33]))
    choices = data.draw(st.integers(1, 3))
    numbers = data.draw(st.lists(st.integers(0, count), min_size=rows * choices, max_size=rows * choices))
    draw, chosen = Draw(), torch.tensor(numbers).view(rows, choices)
    plain, on_gpu = mixtures(draw, count)
    hidden, shares = draw.normal(rows, HIDDEN), draw.normal(rows, choices)
    expected = experts(hidden, chosen, shares, plain, impl="reference")
    assert distance(experts(hidden, chosen, shares, on_gpu, impl="triton"), expected) <= TOLERANCES[torch.float32]


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_blocks_hold_every_choice_once_and_the_grid_is_large_enough(data: st.DataObject) -> None:
    count, rows = data.draw(st.sampled_from([1, 2, 5, 130])), data.draw(st.sampled_from([2, 3, 33, 700]))
    favourite = data.draw(st.integers(0, count))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    chosen = torch.randint(0, count + 1, (rows, 2), generator=generator)
    chosen[: rows // data.draw(st.integers(1, 3))] = favourite
    blocks = blocks_of(chosen, count, gpu.Launcher())
    flat, per_expert = chosen.flatten(), torch.bincount(chosen.flatten(), minlength=count + 1)[:count]
    begins = blocks.begins.long()
    assert torch.equal(begins.diff(), per_expert)
    assert begins[0] == 0
    placed = int(begins[-1])
    order = blocks.order[:placed].long()
    assert torch.equal(order, flat.argsort(stable=True)[:placed])
    assert torch.equal(blocks.places[order].long(), torch.arange(placed))
    assert int(((per_expert + blocks.size - 1) // blocks.size).sum()) <= blocks.most


def test_rows_beyond_one_call_equal_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["labkit.kernels.experts.triton_impl"], "ROWS_AT_ONCE", 8)
    draw = Draw()
    check(draw, mixtures(draw), ((21, 2),))


def test_the_sum_is_added_to_a_residual() -> None:
    draw = Draw()
    _, on_gpu = mixtures(draw)
    hidden, shares, residual = draw.normal(3, HIDDEN), draw.normal(3, 2), draw.normal(3, OUTPUTS)
    chosen, out = chosen_of(3, 2), torch.empty(3, OUTPUTS)
    alone = experts(hidden, chosen, shares, on_gpu, impl="triton")
    fused_experts(hidden, chosen, shares, on_gpu, out, gpu.Launcher(), residual)
    assert torch.equal(out, alone + residual)


@pytest.mark.parametrize("rows", [1, 3, 70])
def test_an_expert_that_no_row_chose_is_not_read(rows: int) -> None:
    draw = Draw()
    _, on_gpu = mixtures(draw)
    empty = replace(on_gpu.outs[3], weight=torch.full_like(on_gpu.outs[3].weight, torch.nan))
    on_gpu = replace(on_gpu, outs=(*on_gpu.outs[:3], empty, on_gpu.outs[4]))
    hidden, chosen, shares = draw.normal(rows, HIDDEN), torch.tensor([[0, 4]]).repeat(rows, 1), torch.ones(rows, 2)
    assert experts(hidden, chosen, shares, on_gpu, impl="triton").isfinite().all()
    chosen[-1, 0] = 3
    finite = experts(hidden, chosen, shares, on_gpu, impl="triton").isfinite().all(1)
    assert finite.tolist() == [True] * (rows - 1) + [False]


def test_a_place_without_an_expert_adds_nothing() -> None:
    draw = Draw()
    _, on_gpu = mixtures(draw)
    hidden = draw.normal(2, HIDDEN)
    one = experts(hidden, torch.tensor([[2], [EXPERTS]]), torch.ones(2, 1), on_gpu, impl="triton")
    more = experts(hidden, torch.tensor([[EXPERTS, 2], [EXPERTS] * 2]), torch.ones(2, 2), on_gpu, impl="triton")
    assert torch.equal(one, more)
    assert not one[1].any()
    assert not experts(hidden[:1], torch.tensor([[EXPERTS]]), torch.ones(1, 1), on_gpu, impl="triton").any()


def test_the_order_of_a_rows_choices_and_other_rows_change_no_bit() -> None:
    draw = Draw()
    _, on_gpu = mixtures(draw)
    hidden, chosen, shares = draw.normal(5, HIDDEN), chosen_of(5, 3), draw.normal(5, 3)
    every = experts(hidden, chosen, shares, on_gpu, impl="triton")
    turned = experts(hidden, chosen.flip(1).contiguous(), shares.flip(1).contiguous(), on_gpu, impl="triton")
    assert torch.equal(turned, every)
    few = experts(hidden[2:4], chosen[2:4], shares[2:4], on_gpu, impl="triton")
    assert torch.equal(few, every[2:4])


def test_a_models_matrices_are_read_in_place() -> None:
    stack = Linear(torch.randn(6, 4), None, 2, 4, "rows")
    parts = [replace(stack, weight=part) for part in stack.weight.chunk(3)]
    regions = tuple(MlpWeights(NO_NORM, part, "silu") for part in parts)
    ups, downs = ExpertMlps(regions, tuple(replace(part, weight=part.weight.clone()) for part in parts)).stacks
    assert ups.weight.data_ptr() == stack.weight.data_ptr()
    assert ups.outputs == 6
    for joined in (ups, downs):
        assert torch.equal(joined.weight, stack.weight)


def test_experts_that_differ_in_their_codes_are_refused() -> None:
    draw = Draw(torch.int8, bits=4)
    _, on_gpu = mixtures(draw, 2, bias=False)
    _, of_eight_bits = mixtures(Draw(torch.int8), 2, bias=False)
    mixed = replace(on_gpu, outs=(on_gpu.outs[0], of_eight_bits.outs[1]))
    with pytest.raises(UserError, match="experts whose matrices differ in their codes"):
        experts(draw.normal(1, HIDDEN), torch.tensor([[1]]), torch.ones(1, 1), mixed, impl="triton")
