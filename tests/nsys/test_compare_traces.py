"""The parts of the difference of two traces add up, and each is what its name says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.traces.handmade import Recorder, disorder

from labkit.nsys.tables.budget import budget
from labkit.nsys.tables.compare import compare_traces
from labkit.nsys.tables.selection import EVERYTHING, Selection
from labkit.nsys.tables.units import units_of
from labkit.nsys.trace import Trace, TraceError
from labkit.system.asked_from import from_command_line


def steps(attention: tuple[str, ...], *, kernel_us: float = 10.0, ranges: bool = True, wait_us: float = 0.0) -> Trace:
    """Three steps of a product, the kernels `attention`, and a norm; the CPU waits `wait_us` before each step."""
    recorder, time_us = Recorder(), 0.0
    for step in range(3):
        begin = time_us
        time_us += wait_us
        for name in ("product", *attention, "norm"):
            recorder.kernel(time_us, time_us + 5, time_us + 5 + kernel_us, name=name)
            time_us += 20
        if ranges:
            recorder.range("attention", begin + wait_us + 15, time_us - 25, domain="")
            recorder.range(f"ProfilerStep#{step}", begin, time_us, domain="")
    return recorder.trace()


def paced(pace_us: float, *, ranges: bool = True, steps: int = 50) -> Trace:
    """Steps of two kernels; a step begins every `pace_us`."""
    recorder = Recorder()
    for step in range(steps):
        begin = pace_us * step
        for offset in (0, 20):
            recorder.kernel(begin + offset, begin + offset + 5, begin + offset + 15)
        if ranges:
            recorder.range(f"forward, op_id = {step}", begin, begin + 30, domain="")
    return recorder.trace()


@pytest.mark.parametrize("ranges", [True, False])
def test_windows_of_one_length_are_compared_by_what_is_done_in_them(ranges: bool) -> None:
    """B does 20 steps in the time in which A does 25."""
    window = Selection(window_ns=(0, 1_000_000))
    comparison = compare_traces(paced(40, ranges=ranges), paced(50, ranges=ranges), window)
    assert comparison.b_ns / comparison.a_ns == pytest.approx(1, rel=0.03)
    remarks = " ".join(comparison.remarks)
    if not ranges:
        assert comparison.units is None
        assert "50 and 40 operations" in remarks
        assert "do both do the same work?" in remarks
        return
    assert comparison.units is not None
    assert (comparison.units.name, comparison.units.a, comparison.units.b) == ("forward", 25, 20)
    assert comparison.ratio == pytest.approx(1.25, rel=0.03)
    assert "A has 25 and B 20 of 'forward'" in remarks
    for parts in (comparison.ranges, comparison.kernels):
        assert parts["a_unit_ns"].sum() == pytest.approx(comparison.a_ns / 25)
        assert parts["unit_change"].sum() == pytest.approx(comparison.ratio - 1)
    named = compare_traces(paced(40), paced(50), Selection(window_ns=(0, 1_000_000), range="forward"))
    assert named.ratio == pytest.approx(1.0)
    assert named.units == comparison.units


def test_a_step_that_a_window_cuts_counts_by_its_part() -> None:
    units = units_of(paced(40), paced(40), Selection(window_ns=(0, 58_500)))
    assert units is not None
    assert units.a == pytest.approx(1.45)
    assert not units.differ
    assert units_of(paced(40, steps=1), paced(40, steps=1), EVERYTHING) is None


@pytest.mark.parametrize("seed", range(3))
def test_the_parts_add_up_to_the_difference_of_the_spans(seed: int) -> None:
    a, b = disorder(seed, ranks=2), disorder(seed + 10, ranks=2)
    comparison = compare_traces(a, b)
    spans = [int(budget(trace)["span_ns"].sum()) for trace in (a, b)]
    assert (comparison.a_ns, comparison.b_ns) == tuple(spans)
    for parts in (comparison.ranges, comparison.kernels):
        assert (parts["a_ns"].sum(), parts["b_ns"].sum()) == tuple(spans)
        assert parts["difference_ns"].sum() == spans[1] - spans[0]
        assert parts["change"].sum() == pytest.approx(spans[1] / spans[0] - 1)
        assert parts["difference_ns"].abs().is_monotonic_decreasing
    window = Selection(window_ns=(20_000, 60_000))
    part = compare_traces(a, b, window)
    assert part.a_ns == budget(a, window)["span_ns"].sum()


def test_kernels_in_the_same_place_are_compared_with_each_other() -> None:
    comparison = compare_traces(steps(("scores", "softmax", "values")), steps(("flash",), kernel_us=12.0))
    parts = comparison.kernels.set_index("name")
    assert parts.loc["scores -> flash", ["a_count", "b_count", "a_ns", "b_ns"]].tolist() == [9, 3, 90_000, 36_000]
    assert parts.loc["product", "difference_ns"] == 3 * 2_000
    assert not [name for name in parts.index if "nothing" in name]


def test_ranges_are_told_apart_by_their_paths_without_the_numbers_of_steps() -> None:
    comparison = compare_traces(steps(("flash",)), steps(("flash",), kernel_us=11.0))
    paths = comparison.ranges.set_index("name")
    assert {"ProfilerStep", "ProfilerStep/attention"} < set(paths.index)
    assert paths.loc["ProfilerStep/attention", ["a_count", "b_count", "difference_ns"]].tolist() == [3, 3, 3_000]
    without = compare_traces(steps(("flash",)), steps(("flash",), ranges=False))
    assert without.ranges.empty
    assert not without.kernels.empty


def test_idle_time_is_a_part_with_its_cause() -> None:
    comparison = compare_traces(steps(("flash",)), steps(("flash",), wait_us=100.0))
    worst = comparison.kernels.iloc[0]
    assert worst["name"] == "idle: host code"
    assert worst["difference_ns"] == pytest.approx(2 * 100_000, rel=0.01)  # the first wait precedes all GPU work


def test_where_idle_time_is_not_known_busy_time_is_compared() -> None:
    trace = steps(("flash",))
    calls = trace.calls.assign(name=trace.calls["name"].cat.rename_categories({"launch": "cudaGraphLaunch"}))
    lost = replace(trace, calls=calls.assign(correlation=calls["correlation"] + 100))
    comparison = compare_traces(trace, lost)
    assert comparison.a_ns == budget(trace)["busy_ns"].sum()
    assert "busy time is compared" in comparison.remarks[0]


def test_different_work_is_remarked_and_none_refused() -> None:
    sides = steps(("flash",)), steps(("flash",) * 4)
    comparison = compare_traces(*sides)
    assert "do both do the same work? window_ns or range of a Selection choose a part" in " ".join(comparison.remarks)
    with from_command_line():
        remarks = " ".join(compare_traces(*sides).remarks)
    assert "do both do the same work? --window or --range choose a part" in remarks
    with pytest.raises(TraceError, match="got no GPU operation in trace B"):
        compare_traces(steps(("flash",)), disorder(0, gpu=False))
