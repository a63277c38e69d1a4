"""The checker knows right answers from the usual mistakes."""

import pytest
from comparisons import BANDWIDTH_GB_S, comparison

from labkit.exercises import check_limit, model_shape

READ_MB = 498.0
LIMIT_MS = READ_MB / BANDWIDTH_GB_S


def verdicts(read_mb: float | None, limit_ms: float | None) -> list[str]:
    text: str = check_limit(comparison(), read_mb, limit_ms).data
    return text.splitlines()


def test_no_answer_is_no_error() -> None:
    assert all("not answered yet" in verdict for verdict in verdicts(None, None))


@pytest.mark.parametrize("off", [0.995, 1.0, 1.005])
def test_right_within_one_percent(off: float) -> None:
    assert all("**right**" in verdict for verdict in verdicts(READ_MB * off, LIMIT_MS * off))


@pytest.mark.parametrize(
    ("read_mb", "hint"), [(2 * READ_MB, "bytes of a number"), (READ_MB / 2, "bytes of a number"), (700.0, "too high")]
)
def test_wrong_bytes_get_a_hint(read_mb: float, hint: str) -> None:
    assert hint in verdicts(read_mb, None)[0]


@pytest.mark.parametrize(
    ("limit_ms", "hint"), [(LIMIT_MS / 1e3, "seconds"), (LIMIT_MS * 1e3, "microseconds"), (1.0, "too low")]
)
def test_wrong_times_get_a_hint(limit_ms: float, hint: str) -> None:
    assert hint in verdicts(None, limit_ms)[1]


def test_weights_alone_are_told_from_what_a_step_reads() -> None:
    record = comparison()
    work = record.candidate.work
    assert work is not None
    heavier = record.candidate.model_copy(update={"work": work.model_copy(update={"weight_bytes": 600_000_000})})
    text: str = check_limit(record.model_copy(update={"candidate": heavier}), 600.0, None).data
    assert "these are all weights" in text


def test_without_a_probe_there_is_nothing_to_check() -> None:
    assert "nothing to check" in check_limit(comparison(probed=False), 1.0, 1.0).data


def test_a_models_shape_says_where_its_weights_come_from() -> None:
    text: str = model_shape("tiny-gpt2").data
    assert "random weights, seed 0" in text
    assert "GPT2LMHeadModel" in text
