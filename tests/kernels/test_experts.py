"""A mixture of experts."""

import sys
from dataclasses import replace

import pytest
import torch
from helpers.kernels.ops import WEIGHTS, Draw, assert_near, tolerance

from labkit.kernels import ExpertMlps, experts
from labkit.kernels.types import NO_NORM, MlpWeights
from labkit.system.errors import UserError

HIDDEN, INNER, OUTPUTS, EXPERTS = 63, 50, 70, 5
pytestmark = pytest.mark.usefixtures("poisoned", "isa")


def mixtures(draw: Draw, count: int = EXPERTS, *, gated: bool = True) -> tuple[ExpertMlps, ExpertMlps]:
    """The same experts as rows and packed."""
    ups = [draw.linear(INNER, HIDDEN, gated=gated) for _ in range(count)]
    downs = [draw.linear(OUTPUTS, INNER) for _ in range(count)]
    plain, packed = (
        ExpertMlps(tuple(MlpWeights(NO_NORM, up[way], "silu", gated) for up in ups), tuple(down[way] for down in downs))
        for way in (0, 1)
    )
    return plain, packed


def chosen_of(rows: int, choices: int, count: int = EXPERTS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.stack([torch.randperm(count, generator=generator)[:choices] for _ in range(rows)])


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("dtype", WEIGHTS.values(), ids=WEIGHTS)
def test_cpp_equals_reference(dtype: torch.dtype, gated: bool) -> None:
    draw = Draw(dtype)
    plain, packed = mixtures(draw, gated=gated)
    for rows, choices in ((1, 1), (1, 4), (3, 2), (70, 2), (70, 5)):
        hidden, shares = draw.normal(rows, HIDDEN), draw.normal(rows, choices)
        chosen = chosen_of(rows, choices)
        expected = experts(hidden, chosen, shares, plain, impl="reference")
        actual = experts(hidden, chosen, shares, packed, threads=2, impl="cpp")
        assert_near(actual, expected, 1.0 + expected.abs().max(), 8 * tolerance(dtype, roundings=4))


def test_rows_beyond_one_call_equal_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["labkit.kernels.experts"], "ROWS_AT_ONCE", 8)
    draw = Draw()
    plain, packed = mixtures(draw)
    hidden, shares, chosen = draw.normal(21, HIDDEN), draw.normal(21, 2), chosen_of(21, 2)
    expected = experts(hidden, chosen, shares, plain, impl="reference")
    assert_near(experts(hidden, chosen, shares, packed, impl="cpp"), expected, 1.0 + expected.abs().max(), 1e-5)


@pytest.mark.parametrize("impl", ["reference", "cpp"])
def test_an_expert_that_no_row_chose_is_not_read(impl: str) -> None:
    draw = Draw()
    weights = mixtures(draw)[impl == "cpp"]
    empty = replace(weights.outs[3], weight=torch.full_like(weights.outs[3].weight, torch.nan))
    weights = replace(weights, outs=(*weights.outs[:3], empty, weights.outs[4]))
    chosen, shares = torch.tensor([[0, 4], [1, 2]]), torch.ones(2, 2)
    assert experts(draw.normal(2, HIDDEN), chosen, shares, weights, impl=impl).isfinite().all()
    chosen[1, 0] = 3
    assert experts(draw.normal(2, HIDDEN), chosen, shares, weights, impl=impl).isfinite().all(1).tolist() == [
        True,
        False,
    ]


@pytest.mark.parametrize("impl", ["reference", "cpp"])
def test_a_place_without_an_expert_adds_nothing(impl: str) -> None:
    draw = Draw()
    weights = mixtures(draw)[impl == "cpp"]
    hidden = draw.normal(2, HIDDEN)
    one = experts(hidden, torch.tensor([[2], [EXPERTS]]), torch.ones(2, 1), weights, impl=impl)
    more = experts(hidden, torch.tensor([[EXPERTS, 2], [EXPERTS] * 2]), torch.ones(2, 2), weights, impl=impl)
    assert torch.equal(one, more)
    assert not one[1].any()


def test_an_expert_chosen_twice_counts_twice() -> None:
    draw = Draw()
    _, packed = mixtures(draw)
    hidden = draw.normal(1, HIDDEN)
    twice = experts(hidden, torch.tensor([[1, 1]]), torch.tensor([[0.25, 0.5]]), packed, impl="cpp")
    once = experts(hidden, torch.tensor([[1]]), torch.tensor([[0.75]]), packed, impl="cpp")
    assert_near(twice, once, 1.0 + once.abs().max(), 1e-6)


def test_what_does_not_fit_is_refused() -> None:
    draw = Draw()
    _, packed = mixtures(draw)
    hidden, chosen, shares = draw.normal(1, HIDDEN), torch.tensor([[1]]), torch.ones(1, 1)
    for wrong in (-1, EXPERTS + 1):
        with pytest.raises(UserError, match=rf"chosen: got {wrong} to {wrong}, expected 0 to 5"):
            experts(hidden, torch.tensor([[wrong]]), shares, packed, impl="cpp")
    with pytest.raises(UserError, match="expected a tuple of regions and a tuple of as many outs"):
        experts(hidden, chosen, shares, replace(packed, outs=packed.outs[1:]), impl="cpp")
    _, other = draw.linear(OUTPUTS + 1, INNER)
    with pytest.raises(UserError, match=r"got an expert 4 of gated silu 63 -> .* -> 71 .*, expected .* as expert 0"):
        experts(hidden, chosen, shares, replace(packed, outs=(*packed.outs[:4], other)), impl="cpp")
    normed = replace(packed.regions[1], norm=draw.norm("rms", HIDDEN))
    regions = (packed.regions[0], normed, *packed.regions[2:])
    with pytest.raises(UserError, match=r"regions\[1\]: got a norm, expected none"):
        experts(hidden, chosen, shares, replace(packed, regions=regions), impl="cpp")
