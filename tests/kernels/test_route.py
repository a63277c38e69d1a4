"""The choice of experts."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.kernels.ops import WEIGHTS, Draw, assert_near, tolerance
from torch import Tensor

from labkit.kernels import Router, route
from labkit.kernels.gemm import packed as packed_matrix
from labkit.kernels.types import NO_NORM, Linear
from labkit.system.errors import UserError

HIDDEN, EXPERTS = 63, 37
pytestmark = pytest.mark.usefixtures("poisoned", "isa")


def routers(draw: Draw, chosen: int = 4, *, renormalised: bool = True) -> tuple[Router, Router]:
    """The same router as rows and packed."""
    norm, addend_norm = draw.norm("rms", HIDDEN), draw.norm("layer", HIDDEN)
    matrix = draw.linear(EXPERTS, HIDDEN)
    plain, packed = (Router(norm, way, chosen, renormalised, addend_norm) for way in matrix)
    return plain, packed


def dense(chosen: Tensor, shares: Tensor) -> Tensor:
    """The share of every expert [N, EXPERTS], 0 if it was not chosen."""
    return torch.zeros(len(chosen), EXPERTS).scatter_add_(1, chosen, shares)


@pytest.mark.parametrize("renormalised", [False, True])
@pytest.mark.parametrize("dtype", WEIGHTS.values(), ids=WEIGHTS)
def test_cpp_equals_reference(dtype: torch.dtype, renormalised: bool) -> None:
    """With all experts chosen, rounding changes no choice."""
    draw = Draw(dtype)
    for rows, count in ((1, EXPERTS), (3, EXPERTS), (70, EXPERTS)):
        plain, packed = routers(draw, count, renormalised=renormalised)
        inputs = draw.normal(rows, HIDDEN), draw.normal(rows, HIDDEN), draw.normal(HIDDEN)
        expected = route(*inputs, plain, impl="reference")
        actual = route(*inputs, packed, threads=2, impl="cpp")
        for ours, theirs in zip(actual[:2], expected[:2], strict=True):
            assert_near(ours, theirs, 1.0 + theirs.abs().max(), tolerance(dtype, roundings=2))
        assert_near(dense(*actual[2:]), dense(*expected[2:]), torch.ones(()), 8 * tolerance(dtype, roundings=2))


@pytest.mark.parametrize("renormalised", [False, True])
@pytest.mark.parametrize("chosen", [1, 2, 8])
def test_the_largest_logits_are_chosen_in_their_order(chosen: int, renormalised: bool) -> None:
    draw = Draw()
    plain, packed = routers(draw, chosen, renormalised=renormalised)
    hidden = draw.normal(70, HIDDEN)
    expected, actual = (
        route(hidden, None, None, router, threads=2, impl=impl)
        for router, impl in ((plain, "reference"), (packed, "cpp"))
    )
    assert torch.equal(actual[2], expected[2])
    assert_near(actual[3], expected[3], torch.ones(()), 1e-5)
    assert (actual[3].diff(dim=1) <= 0).all()
    total = actual[3].sum(dim=1)
    assert torch.allclose(total, torch.ones(70)) if renormalised else bool((total < 1).all())
    assert torch.equal(actual[1], hidden)


def with_logits(logits: Tensor, chosen: int, impl: str, **fields: Any) -> tuple[Tensor, Tensor]:
    """The choice of rows with these logits [N, E]: the rows are the logits, and the matrix is the identity. fields: of
    the router.
    """
    experts = logits.shape[1]
    matrix = Linear(torch.eye(experts), None, experts, experts, "rows")
    matrix = packed_matrix(matrix) if impl == "cpp" else matrix
    router = replace(Router(NO_NORM, matrix, chosen, renormalised=True), **fields)
    _, _, numbers, shares = route(logits, None, None, router, impl=impl)
    return numbers, shares


def test_of_equal_logits_the_first_experts_are_chosen_once_each() -> None:
    numbers, shares = with_logits(torch.zeros(2, 5), 3, "cpp")
    assert numbers.tolist() == [[0, 1, 2]] * 2
    assert torch.allclose(shares, torch.full((2, 3), 1 / 3))


@pytest.mark.parametrize("impl", ["reference", "cpp"])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_logit_that_is_no_number_makes_the_shares_of_its_row_none(wrong: float, impl: str) -> None:
    logits = torch.arange(12.0).view(2, 6)
    logits[1] = wrong
    numbers, shares = with_logits(logits, 2, impl)
    assert numbers[0].tolist() == [5, 4]
    assert shares[0].isfinite().all()
    assert shares[1].isnan().all()
    assert ((numbers >= 0) & (numbers < 6)).all()


@pytest.mark.parametrize("renormalised", [False, True])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_a_bias_changes_the_choice_alone(scores: str, renormalised: bool) -> None:
    draw = Draw()
    hidden, bias = draw.normal(70, HIDDEN), draw.normal(EXPERTS)
    plain, packed = (replace(router, scores=scores, choice_bias=bias, factor=2.5) for router in routers(draw))
    whole = replace(plain, chosen=EXPERTS, renormalised=False, choice_bias=None, factor=1.0)
    of_all = dense(*route(hidden, None, None, whole, impl="reference")[2:])
    order = (of_all + bias).argsort(dim=1, descending=True)[:, :4]
    kept = of_all.gather(1, order)
    expected = 2.5 * (kept / kept.sum(1, keepdim=True) if renormalised else kept)
    for impl, router in (("reference", plain), ("cpp", packed)):
        _, _, chosen, shares = route(hidden, None, None, replace(router, renormalised=renormalised), impl=impl)
        assert torch.equal(chosen, order)
        assert_near(shares, expected, torch.ones(()), 1e-5)
    assert not torch.equal(order, of_all.argsort(dim=1, descending=True)[:, :4])


@pytest.mark.parametrize("bias", [None, torch.zeros(6)])
@pytest.mark.parametrize("impl", ["reference", "cpp"])
def test_sigmoids_of_logits_are_scores(impl: str, bias: Tensor | None) -> None:
    logits = torch.tensor([[-2.0, -100.0, 0.0, 3.0, torch.nan, 1.0]]).expand(2, -1).clone()
    logits[0, 4] = 30.0
    numbers, shares = with_logits(logits, 3, impl, scores="sigmoid", choice_bias=bias, renormalised=False)
    assert numbers[0].tolist() == [4, 3, 5]
    assert torch.allclose(shares[0], torch.tensor([30.0, 3.0, 1.0]).sigmoid())
    assert shares[1].isnan().all()


def test_large_logits_do_not_overflow() -> None:
    numbers, shares = with_logits(torch.tensor([[-3e38, 3e38, 100.0, 3e38]]), 2, "cpp")
    assert numbers.tolist() == [[1, 3]]
    assert shares.tolist() == [[0.5, 0.5]]


def test_what_does_not_fit_is_refused() -> None:
    draw = Draw()
    plain, packed = routers(draw)
    hidden = draw.normal(2, HIDDEN)
    for wrong in (0, EXPERTS + 1, 2.0):
        with pytest.raises(UserError, match=rf"router.chosen = {wrong}, expected 1 to {EXPERTS}, the number of"):
            route(hidden, None, None, replace(packed, chosen=wrong), impl="cpp")  # type: ignore[arg-type]
    for fields, match in (
        ({"scores": "tanh"}, "router.scores = 'tanh', expected 'softmax' or 'sigmoid'"),
        ({"factor": torch.nan}, "router.factor = nan, expected a finite float32"),
        ({"choice_bias": torch.zeros(3)}, rf"router.choice_bias: expected contiguous float32 \[{EXPERTS}\]"),
    ):
        with pytest.raises(UserError, match=match):
            route(hidden, None, None, replace(packed, **fields), impl="cpp")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"hidden: expected contiguous float32 \[rows, 63\]"):
        route(draw.normal(2, HIDDEN + 1), None, None, packed, impl="cpp")
    with pytest.raises(UserError, match="unknown impl 'gpu'; expected one of cpp, reference, triton"):
        route(hidden, None, None, plain, impl="gpu")
