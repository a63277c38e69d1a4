"""The checker knows right answers from the usual mistakes."""

import pytest
from comparisons import BANDWIDTH_GB_S, comparison

from labkit.notebooks.exercises import check_limit, check_sums, model_shape

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


SUMS = {"tiny-gptj": 1, "tiny-gpt2": 2, "tiny-llama": 2, "gpt-j-6b": 1, "gpt-neox-20b": 1, "bloom-560m": 2}


def sum_verdicts(all_reduces: dict[str, int | None], kb: float | None = None, model: str = "tiny-llama") -> str:
    text: str = check_sums(model, all_reduces, kb).data
    return text


@pytest.mark.parametrize(("model", "right"), SUMS.items())
@pytest.mark.parametrize("answer", [0, 1, 2, 3, 4])
def test_sums_of_a_layer_are_judged_by_each_models_own_architecture(model: str, right: int, answer: int) -> None:
    line = sum_verdicts({model: answer}).splitlines()[0]
    assert ("**right**" in line) == (answer == right)
    assert answer == right or "not yet" in line


@pytest.mark.parametrize("answer", [1, 2])
def test_one_answer_for_all_models_is_never_right_for_all(answer: int) -> None:
    assert "not yet" in sum_verdicts(dict.fromkeys(SUMS, answer))


def test_wrong_sums_get_a_hint() -> None:
    assert "start from" in sum_verdicts({"tiny-gptj": 2})
    assert "all layers" in sum_verdicts({"gpt-j-6b": 28})
    assert "part of each output" in sum_verdicts({"tiny-gpt2": 0})
    assert "cut by columns" in sum_verdicts({"tiny-gpt2": 4})


TINY_KB = 2 * 2 * 64 * 4 / 1e3  # sums, layers, numbers, bytes


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (TINY_KB, "**right**"),
        (TINY_KB / 2, "half of it"),
        (TINY_KB / 4, "four bytes"),
        (TINY_KB / 1.024, "1,024"),
        (7 * TINY_KB, "too high"),
        (None, "not answered yet"),
    ],
)
def test_the_kilobytes_of_a_step_are_counted_for_the_model_at_hand(answer: float | None, said: str) -> None:
    assert said in sum_verdicts({}, answer)
