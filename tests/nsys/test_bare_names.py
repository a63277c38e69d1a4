"""Numbers that only count leave the names of ranges; numbers of parts of a model stay."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from helpers.traces.handmade import Recorder

from labkit.nsys.tables.bare_names import MANY, without_numbers
from labkit.nsys.tables.compare import compare_traces
from labkit.nsys.tables.ranges import ranges
from labkit.nsys.tables.selection import Selection
from labkit.nsys.timeline.lanes import build_lanes
from labkit.nsys.timeline.shades import SHADES
from labkit.nsys.trace import Trace

FORMS = ("{} 7", "{}#7", "{}[7]", "{}(7)", "{}_7", "{}/7", "{}=7", "{}: 7", "{}-7", "{} [7]")


def bare(*names: str) -> list[str]:
    column = pd.Categorical(names)
    return [str(name) for name in without_numbers(column, np.zeros(len(names), np.int64))]


def train_steps(pace_us: float, count: int, name: str = "train_step {}") -> Trace:
    recorder = Recorder()
    for step in range(count):
        begin = pace_us * step
        for offset in (0, 15):
            recorder.kernel(begin + offset, begin + offset + 4, begin + offset + 14)
        recorder.range(name.format(step), begin, begin + 35, domain="")
    return recorder.trace()


@pytest.mark.parametrize("form", FORMS)
def test_a_last_number_that_only_counts_is_left_out(form: str) -> None:
    for word in ("train_step", "iteration", "epoch"):
        assert bare(form.format(word)) == [word]
    many = [form.format("sample").replace("7", str(number)) for number in range(MANY)]
    assert set(bare(*many)) == {"sample"}
    assert bare(*many[1:]) == many[1:]
    assert bare(*many, *many) == [*many, *many]


@pytest.mark.parametrize("word", ["layer", "layers", "rank", "expert", "block", "gpu"])
@pytest.mark.parametrize("form", FORMS)
def test_numbers_of_parts_stay(word: str, form: str) -> None:
    names = [form.format(word).replace("7", str(number)) for number in range(2 * MANY)]
    assert bare(*names) == names


def test_numbers_that_belong_to_a_name_stay() -> None:
    kept = [
        "conv2d",
        "layers.3",
        "step_0.5",
        "labkit:decode/layer.3/qkv",
        "fp16",
        "aten::upsample_nearest2d",
        "f (a:7)",
    ]
    assert bare(*kept) == kept
    assert bare("epoch 1 step 20/100", "step_3_forward") == ["epoch step", "step_forward"]


@pytest.mark.parametrize("name", ["train_step {}", "step={}", "sample {}"])
def test_steps_with_numbers_are_compared_by_one_step(name: str) -> None:
    """B needs an eighth more time for a step, and does fewer steps in the window."""
    sides = train_steps(40, 200, name), train_steps(45, 180, name)
    comparison = compare_traces(*sides, Selection(window_ns=(0, 3_600_000)))
    assert comparison.units is not None
    assert (comparison.units.a, comparison.units.b) == (90, 80)
    assert comparison.ratio == pytest.approx(1.125, rel=0.01)
    assert any("A has 90 and B 80" in remark for remark in comparison.remarks)


def test_steps_with_numbers_are_one_row_and_one_colour() -> None:
    trace = train_steps(40, 20)
    assert ranges(trace)[["name", "count"]].values.tolist() == [["train_step", 20]]
    assert build_lanes(trace).shades[len(SHADES) :] == ("train_step",)
