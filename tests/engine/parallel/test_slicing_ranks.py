"""Sliced models on 2 and 3 processes against the whole one: logits, greedy tokens, searches, refusals.

One world of processes runs all of it, once.
"""

import json
import multiprocessing
import time
from pathlib import Path

import pytest
from sliced_models import MODELS
from sliced_ranks import DEGREES, WORLD, Outcomes, work

PATIENCE_S = 400.0


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Outcomes]:
    """Of each rank."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=work, args=(rank, folder), daemon=True) for rank in range(WORLD)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + PATIENCE_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    for process in processes:
        process.kill()
    assert [process.exitcode for process in processes] == [0] * WORLD
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]


def problems(outcomes: list[Outcomes], check: str, degree: int) -> list[str]:
    found = [rank[f"{check} on {degree}"] for rank in outcomes[:degree]]
    return [problem for problem in found if problem]


@pytest.mark.timeout(450)
@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("name", MODELS)
def test_ranks_give_the_logits_and_tokens_of_one_process(outcomes: list[Outcomes], name: str, degree: int) -> None:
    assert not problems(outcomes, name, degree)


@pytest.mark.timeout(450)
def test_a_policy_of_deepspeed_gives_them_too(outcomes: list[Outcomes]) -> None:
    assert not problems(outcomes, "policy", 3)


@pytest.mark.timeout(450)
@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("dtype", ["torch.bfloat16", "torch.float16"])
def test_low_precision_is_as_near_as_in_one_process(outcomes: list[Outcomes], dtype: str, degree: int) -> None:
    assert not problems(outcomes, dtype, degree)


@pytest.mark.timeout(450)
@pytest.mark.parametrize("degree", DEGREES)
def test_what_the_first_rank_refuses_is_refused_on_every_rank(outcomes: list[Outcomes], degree: int) -> None:
    assert not problems(outcomes, "refusal", degree)


@pytest.mark.timeout(450)
@pytest.mark.parametrize("degree", DEGREES)
def test_a_rank_with_another_model_is_named(outcomes: list[Outcomes], degree: int) -> None:
    assert not problems(outcomes, "odd model", degree)
