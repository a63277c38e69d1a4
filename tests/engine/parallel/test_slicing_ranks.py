"""Sliced models on 2 and 3 processes, compared with the whole model: logits, greedy tokens, searches, refusals."""

import pytest
from helpers.models.sliced_models import MODELS
from helpers.ranks.sliced_ranks import Outcomes
from helpers.sweeps import swept

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(params=swept(["sliced_on_three", "sliced_on_two"], []))
def outcomes(request: pytest.FixtureRequest) -> list[Outcomes]:
    """Outcomes by rank."""
    by_rank: list[Outcomes] = request.getfixturevalue(request.param)
    return by_rank


def problems(outcomes: list[Outcomes], check: str) -> list[str]:
    return [rank[check] for rank in outcomes if rank[check]]


@pytest.mark.parametrize("name", MODELS)
def test_ranks_give_the_logits_and_tokens_of_one_process(outcomes: list[Outcomes], name: str) -> None:
    assert not problems(outcomes, name)


def test_a_policy_of_deepspeed_gives_them_too_and_on_some_of_the_ranks(outcomes: list[Outcomes]) -> None:
    assert not problems(outcomes[:2], "policy")


@pytest.mark.parametrize("dtype", ["torch.bfloat16", "torch.float16"])
def test_low_precision_is_as_near_as_in_one_process(outcomes: list[Outcomes], dtype: str) -> None:
    assert not problems(outcomes, dtype)


def test_what_the_first_rank_refuses_is_refused_on_every_rank(outcomes: list[Outcomes]) -> None:
    assert not problems(outcomes, "refusal")


def test_a_rank_with_another_model_is_named(outcomes: list[Outcomes]) -> None:
    assert not problems(outcomes, "odd model")
