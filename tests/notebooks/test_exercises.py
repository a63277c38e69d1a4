"""The checker tells right answers from the usual mistakes."""

from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.studies.comparisons import BANDWIDTH_GB_S, comparison
from helpers.studies.precision_studies import NUMBERS, study

from labkit.notebooks.exercises import (
    BATCH,
    CONTEXT,
    byte_budget,
    check_gap,
    check_groups,
    check_limit,
    check_sums,
    model_cut,
    try_kernel,
)
from labkit.notebooks.shape import model_shape
from labkit.system.errors import UserError

GPT2 = 768, 12, 50_257  # width, layers, size of the vocabulary
CACHE_MB = 2 * GPT2[0] * GPT2[1] * 2 * CONTEXT / 1e6  # one sequence: keys and values of two bytes
READ_MB = 2 * (12 * GPT2[0] ** 2 * GPT2[1] + GPT2[0] * GPT2[2]) / 1e6 + BATCH * CACHE_MB
LIMIT_MS = READ_MB / BANDWIDTH_GB_S


def verdicts(read_mb: object, limit_ms: object) -> list[str]:
    text: str = check_limit(comparison(), read_mb, limit_ms).data
    return text.splitlines()


def test_no_answer_is_no_error() -> None:
    assert all("not answered yet" in verdict for verdict in verdicts(None, None))


@pytest.mark.parametrize("factor", [0.995, 1.0, 1.005])
def test_answers_within_one_percent_are_right(factor: float) -> None:
    assert all("**right**" in verdict for verdict in verdicts(READ_MB * factor, LIMIT_MS * factor))


def test_the_measured_and_printed_bytes_are_not_the_answer() -> None:
    """The figures and notes above the exercise name the bytes of the measured step, which is another case."""
    record = comparison()
    work = record.candidate.work
    assert work is not None
    assert not any("**right**" in line for line in verdicts(work.decode_bytes / 1e6, work.floor_ms(BANDWIDTH_GB_S)))


@pytest.mark.parametrize(
    ("read_mb", "hint"),
    [
        (2 * READ_MB, "two bytes"),
        (READ_MB - BATCH * CACHE_MB, "these are the weights"),
        (READ_MB - (BATCH - 1) * CACHE_MB, "this is one sequence"),
        (BATCH * (READ_MB - (BATCH - 1) * CACHE_MB), "the weights once"),
        (READ_MB / 2, "bytes of a number"),
        (READ_MB / 1e3, "a factor of 1,000; which unit"),
        (5 * READ_MB, "too high"),
    ],
)
def test_wrong_bytes_get_a_hint(read_mb: float, hint: str) -> None:
    assert hint in verdicts(read_mb, None)[0]


@pytest.mark.parametrize(
    ("limit_ms", "hint"), [(LIMIT_MS / 1e3, "seconds"), (LIMIT_MS * 1e3, "microseconds"), (1.0, "too low")]
)
def test_wrong_times_get_a_hint(limit_ms: float, hint: str) -> None:
    assert hint in verdicts(None, limit_ms)[1]


def test_without_a_probe_there_is_nothing_to_check() -> None:
    assert "cannot be checked" in check_limit(comparison(probed=False), 1.0, 1.0).data


def test_a_models_shape_says_where_its_weights_come_from() -> None:
    text: str = model_shape("tiny-gpt2").data
    assert "random weights, seed 0" in text
    assert "GPT2LMHeadModel" in text


SUMS = {"tiny-gptj": 1, "tiny-gpt2": 2, "tiny-llama": 2, "gpt-j-6b": 1, "gpt-neox-20b": 1, "bloom-560m": 2}


def sum_verdicts(all_reduces: object, kb: object = None, model: str = "tiny-llama") -> str:
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
    ("answer", "message"),
    [
        (TINY_KB, "**right**"),
        (TINY_KB / 2, "half of it"),
        (TINY_KB / 4, "four bytes"),
        (TINY_KB / 1.024, "1,024"),
        (7 * TINY_KB, "too high"),
        (None, "not answered yet"),
    ],
)
def test_the_kilobytes_of_a_step_are_counted_for_the_model_at_hand(answer: float | None, message: str) -> None:
    assert message in sum_verdicts({}, answer)


SHARE = 40.0


def gap_verdict(share: object, stage: object = "mlp", most_gain: object = None) -> str:
    """Verdict on a pair whose stage `mlp` changed most: it took 4 ms of a step of 10 ms."""
    stages = pd.DataFrame({"ms": [-3.0, 0.5], "vanilla_ms": [4.0, 2.0]}, index=["mlp", "qkv"])
    pair: Any = SimpleNamespace(difference=SimpleNamespace(by_stage=stages, vanilla=SimpleNamespace(mean_ms=10.0)))
    text: str = check_gap(pair, stage, share, most_gain).data
    return text


@pytest.mark.parametrize(
    ("share", "message"),
    [(SHARE, "**right**"), (SHARE / 100, "a fraction"), (70, "too high"), (None, "not answered yet")],
)
def test_a_share_of_what_changed_most_gets_its_verdict(share: float | None, message: str) -> None:
    assert message in gap_verdict(share).splitlines()[1]


@pytest.mark.parametrize(
    ("most_gain", "message"),
    [
        (10 / 6, "**right**"),
        (2.5, "the step / the stage"),
        (0.6, "the old time / the new one"),
        (None, "not answered yet"),
    ],
)
def test_the_most_gain_is_the_step_without_the_stage(most_gain: float | None, message: str) -> None:
    assert message in gap_verdict(SHARE, "mlp", most_gain).splitlines()[2]


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ("mlp", "**right**"),
        ("qkv", "another one changed more"),
        ("qvk", "did you mean 'qkv'?"),
        (None, "not answered yet"),
        (3, "expected the name of a stage"),
    ],
)
def test_the_stage_that_changed_most_is_asked_for_and_not_told(stage: object, message: str) -> None:
    text = gap_verdict(SHARE, stage)
    assert message in text.splitlines()[0]
    assert ("mlp" in text) == (stage == "mlp")
    assert ("name the stage first" in text) == (stage != "mlp")


BUDGETED_MB = NUMBERS * 4.5 / 8e6  # int4-64, with scales and minima


def group_verdicts(precision: object, layer_mb: object = None) -> list[str]:
    text: str = check_groups(study(), precision, layer_mb).data
    return text.splitlines()


@pytest.mark.parametrize(
    ("precision", "message"),
    [
        ("int4-64", "**right**"),
        (" int4-64 ", "**right**"),
        ("int4-32-symmetric", "its bytes can be spent better"),
        ("int4-64-symmetric", "leaves bytes"),
        ("int4-32", "its codes alone would fit"),
        ("int8-32", "its codes alone are more"),
        ("int4-64+head8", "leave the LM head out"),
        ("int4-128", "expected one of `int8`"),
        (None, "not answered yet"),
        (4, "expected its name as text"),
    ],
)
def test_a_precision_under_the_byte_budget_gets_its_verdict(precision: object, message: str) -> None:
    line = group_verdicts(precision)[0]
    assert message in line
    assert ("**right**" in line) == (message == "**right**")


@pytest.mark.parametrize(
    ("layer_mb", "message"),
    [
        (BUDGETED_MB, "**right**"),
        (BUDGETED_MB * 4 / 4.5, "only the codes"),
        (BUDGETED_MB * 4.25 / 4.5, "half of the groups' scales"),
        (BUDGETED_MB * 5 / 4.5, "two bytes each"),
        (BUDGETED_MB / 1.048576, "1,024"),
        (BUDGETED_MB / 2, "for one layer"),
        (7 * BUDGETED_MB, "too high"),
        (None, "not answered yet"),
    ],
)
def test_the_bytes_of_a_layer_get_their_verdict(layer_mb: float | None, message: str) -> None:
    assert message in group_verdicts("int4-64", layer_mb)[1]


def test_bytes_are_checked_for_a_precision_that_does_not_fit_too_and_for_none_without_one() -> None:
    assert "**right**" in group_verdicts("int4-32", NUMBERS * 5 / 8e6)[1]
    assert "name one of the precisions first" in group_verdicts("int5", BUDGETED_MB)[1]


def test_the_budget_is_told_and_not_what_fits() -> None:
    text: str = byte_budget(study()).data
    assert f"**{NUMBERS * 4.6 / 8e6:.5f} MB**" in text
    assert "`int4-64`" in text
    assert "`int4-128`" not in text


class Unhelpful:
    """An object whose repr() fails."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


NO_NUMBERS = {
    "text": "498",
    "bytes": b"498",
    "truth": True,
    "list": [498.0],
    "dict": {"mb": 498.0},
    "set": {1, 2},
    "nothing": (),
    "complex": 498 + 0j,
    "decimal": Decimal(498),
    "array": np.array([498.0, 1.0]),
    "numpy truth": np.True_,
    "tensor": torch.tensor(498.0),
    "frame": pd.DataFrame({"mb": [498.0]}),
    "dtype": torch.float32,
    "function": len,
    "class": float,
    "dots": ...,
    "no text": Unhelpful(),
    "nan": float("nan"),
    "inf": float("-inf"),
    "numpy nan": np.float32("nan"),
    "huge": 10**400,
    "long text": "498 " * 10_000,
}


@pytest.mark.parametrize("answer", NO_NUMBERS.values(), ids=NO_NUMBERS)
def test_an_answer_that_is_no_number_is_told_what_is_expected(answer: object) -> None:
    messages = [*verdicts(answer, answer), *sum_verdicts({"tiny-gpt2": answer}, answer).splitlines()]
    messages += [gap_verdict(answer).splitlines()[1], group_verdicts("int4-64", answer)[1]]
    assert len(messages) == 6
    for line in messages:
        assert "not yet: got" in line
        assert "number" in line
        assert len(line) < 300
        assert "\n" not in line


@pytest.mark.parametrize("kind", [int, Fraction, np.int64, np.float32, np.float64])
def test_any_kind_of_number_is_an_answer(kind: type) -> None:
    assert "**right**" in verdicts(kind(round(READ_MB)), None)[0]
    assert "**right**" in gap_verdict(kind(40)).splitlines()[1]
    assert "**right**" in sum_verdicts({"tiny-gpt2": kind(2)})


@pytest.mark.parametrize("answer", NO_NUMBERS.values(), ids=NO_NUMBERS)
def test_any_answer_for_a_precision_gets_a_verdict(answer: object) -> None:
    first, second = group_verdicts(answer, answer)
    assert "not yet: got" in first
    assert "name one of the precisions first" in second


@pytest.mark.parametrize("answer", [None, 2, "2", [2], ("tiny-gpt2", 2), {"tiny-gpt2"}, Unhelpful()])
def test_sums_that_are_no_dict_are_told_so(answer: object) -> None:
    assert "expected a dict" in sum_verdicts(answer).splitlines()[0]


@pytest.mark.parametrize("name", [None, 5, b"gpt2", ["gpt2"], {"gpt2": 1}, ...])
def test_names_of_another_type_are_refused(name: Any) -> None:
    for call in (
        lambda: model_shape(name),
        lambda: model_cut(name, 2),
        lambda: check_sums(name, {}, None),
        lambda: try_kernel(name),
        lambda: try_kernel("residual", name),
    ):
        with pytest.raises(UserError, match="expected its name as text"):
            call()
    if not isinstance(name, list | dict):
        with pytest.raises(UserError, match="expected its name as text"):
            check_sums("tiny-gpt2", {name: 2}, None)


@pytest.mark.parametrize("ranks", [0, -1, 2.0, "2", None, [2]])
def test_ranks_of_another_type_are_refused(ranks: Any) -> None:
    with pytest.raises(UserError, match="expected a number of ranks"):
        model_cut("tiny-gpt2", ranks)
