"""The exercise on free batches accepts answers that follow from the rates, not numbers read from a figure."""

from typing import Any

import pytest
from helpers.studies.streaming_studies import study

from labkit.harness.streaming.plan import StreamRates
from labkit.models.policies import model_config_of
from labkit.notebooks.streaming_exercise import FASTER, check_free_batch, streaming_numbers
from labkit.studies.larger_than_memory import StreamingStudy
from labkit.weights.resolve import resolve

DISK, PEAK = 0.8537, 612.25
ROWS_HERE = PEAK * 2 / (2 * DISK)
ROWS = ROWS_HERE / FASTER  # on the disk of the question


@pytest.fixture(scope="module")
def exercise_study() -> StreamingStudy:
    """A study of gpt2. Its rates have more digits than anybody guesses."""
    template = study()
    return study(plan=template.plan.model_copy(update={"rates": StreamRates(disk_gb_s=DISK, gflop_s=PEAK)}))


def cache_gb() -> float:
    """Size of keys and values of 24 tokens in bfloat16, computed by hand."""
    config = model_config_of(resolve("gpt2").hf_config)
    return ROWS * 24 * 2 * config.num_layers * config.hidden_size * 2 / 1e9


def verdicts(study: StreamingStudy, sequences: object, gigabytes: object = None) -> list[str]:
    return str(check_free_batch(study, sequences, gigabytes).data).splitlines()


def test_answers_from_the_numbers_shown_are_right(exercise_study: StreamingStudy) -> None:
    shown = str(streaming_numbers(exercise_study).data)
    assert "0.8537 GB/s" in shown
    assert "612.2 GFLOP/s" in shown
    assert all("**right**" in line for line in verdicts(exercise_study, 612.2 / 0.8537 / FASTER, round(cache_gb(), 3)))


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (2 * ROWS, "two FLOPs"),
        (ROWS / 2, "not take exactly one byte"),
        (8 * ROWS, "not in bits"),
        (ROWS_HERE, "this is for the disk here"),
        (FASTER * ROWS_HERE, "by fewer sequences"),
        (1 / ROWS, "the other way round"),
        (ROWS * 1.05, "too high"),
        (ROWS * 0.95, "too low"),
        (None, "not answered yet"),
    ],
)
def test_a_wrong_number_of_sequences_is_told_its_mistake(
    exercise_study: StreamingStudy, answer: Any, hint: str
) -> None:
    assert hint in verdicts(exercise_study, answer)[0]


def test_what_the_figures_show_is_another_case(exercise_study: StreamingStudy) -> None:
    assert exercise_study.plan.free_batch is not None
    assert "this is the figure's" in verdicts(exercise_study, exercise_study.plan.free_batch)[0]
    assert "the largest that fits" in verdicts(exercise_study, exercise_study.plan.largest_batch)[0]


@pytest.mark.parametrize(
    ("factor", "hint"),
    [(1 / 2, "keys and values"), (2 / 3, "new tokens have"), (1 / 12, "for one layer"), (1e3, "MB"),
     (1e9 / 2**30, "10^9 bytes")],
)  # fmt: skip
def test_a_wrong_cache_is_told_its_mistake(exercise_study: StreamingStudy, factor: float, hint: str) -> None:
    assert hint in verdicts(exercise_study, None, cache_gb() * factor)[1]


@pytest.mark.parametrize("answer", ["717", True, [717], {}, float("nan"), 10**400, 1j, object()])
def test_any_answer_gets_a_verdict(exercise_study: StreamingStudy, answer: object) -> None:
    assert all(": not yet: got" in line for line in verdicts(exercise_study, answer, answer))
