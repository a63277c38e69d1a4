"""Sliced models on 2 and 3 processes against the whole one: logits, greedy tokens, searches, refusals."""

from typing import Any

import pytest
from sliced_models import MODELS
from sliced_ranks import DEGREES, Outcomes

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def outcomes(of_three: Any) -> list[Outcomes]:
    """Of each rank."""
    return [rank["sliced"] for rank in of_three.answers]


def problems(outcomes: list[Outcomes], check: str, degree: int) -> list[str]:
    found = [rank[f"{check} on {degree}"] for rank in outcomes[:degree]]
    return [problem for problem in found if problem]


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("name", MODELS)
def test_ranks_give_the_logits_and_tokens_of_one_process(outcomes: list[Outcomes], name: str, degree: int) -> None:
    assert not problems(outcomes, name, degree)


def test_a_policy_of_deepspeed_gives_them_too(outcomes: list[Outcomes]) -> None:
    assert not problems(outcomes, "policy", 3)


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("dtype", ["torch.bfloat16", "torch.float16"])
def test_low_precision_is_as_near_as_in_one_process(outcomes: list[Outcomes], dtype: str, degree: int) -> None:
    assert not problems(outcomes, dtype, degree)


@pytest.mark.parametrize("degree", DEGREES)
def test_what_the_first_rank_refuses_is_refused_on_every_rank(outcomes: list[Outcomes], degree: int) -> None:
    assert not problems(outcomes, "refusal", degree)


@pytest.mark.parametrize("degree", DEGREES)
def test_a_rank_with_another_model_is_named(outcomes: list[Outcomes], degree: int) -> None:
    assert not problems(outcomes, "odd model", degree)
