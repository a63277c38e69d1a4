"""The choice of experts in Triton's interpreter, compared with its reference."""

from dataclasses import replace

import pytest
import torch
from helpers.kernels.gpus import INTERPRETED
from helpers.kernels.ops import WEIGHTS, Draw, distance
from helpers.sweeps import crossed
from torch import Tensor

from labkit.kernels import Router, gpu, route
from labkit.kernels.gemm import packed
from labkit.kernels.shapes import TOLERANCES
from labkit.kernels.tuned import Tile
from labkit.kernels.types import NO_NORM, Linear

HIDDEN, EXPERTS = 63, 37
ROWS = (1, 3, 20)
EXACT = TOLERANCES[torch.float32]  # products are in float32 for all types
pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),  # inf - inf, and inf * 0
    pytest.mark.filterwarnings("ignore:overflow encountered in subtract"),  # to -inf, whose exp is 0
    *INTERPRETED,
]


def routers(draw: Draw, chosen: int, *, renormalised: bool = True, norm: str = "rms") -> tuple[Router, Router]:
    """The same router as rows and for Triton."""
    norms = draw.norm(norm, HIDDEN), draw.norm("layer", HIDDEN)
    plain, _ = draw.linear(EXPERTS, HIDDEN)
    of_plain, on_gpu = (
        Router(norms[0], matrix, chosen, renormalised, norms[1]) for matrix in (plain, packed(plain, "triton"))
    )
    return of_plain, on_gpu


@pytest.mark.parametrize(("dtype", "renormalised"), crossed(WEIGHTS, {"renormalised": True, "of all": False}))
def test_route_equals_the_reference(dtype: torch.dtype, renormalised: bool) -> None:
    draw = Draw(dtype)
    for norm, chosen in (("rms", EXPERTS), ("layer", 8), ("none", 1)):
        plain, on_gpu = routers(draw, chosen, renormalised=renormalised, norm=norm)
        for rows in ROWS:
            hidden, addend, bias = draw.normal(rows, HIDDEN), draw.normal(rows, HIDDEN), draw.normal(HIDDEN)
            for added, added_bias in ((addend, bias), (addend, None), (None, None)):
                expected = route(hidden, added, added_bias, plain, impl="reference")
                actual = route(hidden, added, added_bias, on_gpu, impl="triton")
                assert torch.equal(actual[2], expected[2])
                for ours, theirs in zip((*actual[:2], actual[3]), (*expected[:2], expected[3]), strict=True):
                    assert distance(ours, theirs) <= EXACT


@pytest.mark.parametrize("renormalised", [True, False])
@pytest.mark.parametrize(("scores", "biased"), [("sigmoid", False), ("sigmoid", True), ("softmax", True)])
def test_other_scores_equal_the_reference(scores: str, biased: bool, renormalised: bool) -> None:
    """The bias decides the choice, and is not in the shares."""
    draw = Draw()
    choice_bias = draw.normal(EXPERTS) if biased else None
    plain, on_gpu = (
        replace(router, scores=scores, choice_bias=choice_bias, factor=2.5)
        for router in routers(draw, 8, renormalised=renormalised)
    )
    for rows in ROWS:
        hidden = draw.normal(rows, HIDDEN)
        expected = route(hidden, None, None, plain, impl="reference")
        actual = route(hidden, None, None, on_gpu, impl="triton")
        assert torch.equal(actual[2], expected[2])
        assert distance(actual[3], expected[3]) <= EXACT


def test_route_in_several_tiles_equals_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are more programs than shares of the normed rows, and fewer."""
    draw = Draw()
    plain, on_gpu = routers(draw, 8)
    for tile in (Tile(16, 16), Tile(16, 64)):
        monkeypatch.setattr(gpu, "default_tile", lambda *_, tile=tile: tile)
        for rows in (1, 16):
            hidden = draw.normal(rows, HIDDEN)
            expected = route(hidden, None, None, plain, impl="reference")
            actual = route(hidden, None, None, on_gpu, impl="triton")
            assert torch.equal(actual[2], expected[2])
            assert distance(actual[0], expected[0]) <= EXACT


def with_logits(logits: Tensor, chosen: int) -> tuple[Tensor, Tensor]:
    """The choice of rows with these logits [N, E]: the rows are the logits, and the matrix is the identity."""
    experts = logits.shape[1]
    router = Router(NO_NORM, Linear(torch.eye(experts), None, experts, experts, "rows"), chosen, True)
    _, _, numbers, shares = route(logits, None, None, router, impl="triton")
    return numbers, shares


def test_of_equal_logits_the_first_experts_are_chosen_once_each() -> None:
    numbers, shares = with_logits(torch.zeros(2, 5), 3)
    assert numbers.tolist() == [[0, 1, 2]] * 2
    assert torch.allclose(shares, torch.full((2, 3), 1 / 3))


@pytest.mark.parametrize("rows", [2, 20])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_logit_that_is_no_number_makes_the_shares_of_its_row_none(wrong: float, rows: int) -> None:
    logits = torch.arange(6.0).repeat(rows, 1)
    logits[1] = wrong
    numbers, shares = with_logits(logits, 2)
    assert numbers[0].tolist() == [5, 4]
    assert shares[0].isfinite().all()
    assert shares[1].isnan().all()
    assert ((numbers >= 0) & (numbers < 6)).all()
    assert (numbers[:, 0] != numbers[:, 1]).all()


def test_large_logits_do_not_overflow() -> None:
    numbers, shares = with_logits(torch.tensor([[-3e38, 3e38, 100.0, 3e38]]), 2)
    assert numbers.tolist() == [[1, 3]]
    assert shares.tolist() == [[0.5, 0.5]]
