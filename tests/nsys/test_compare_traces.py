"""The difference of two traces in parts: that they add up, and that each is what it is called."""

from __future__ import annotations

from dataclasses import replace

import pytest
from traces import Recorder, disorder

from labkit.nsys.tables.budget import budget
from labkit.nsys.tables.compare import compare_traces
from labkit.nsys.tables.selection import Selection
from labkit.nsys.trace import Trace, TraceError


def steps(attention: tuple[str, ...], *, kernel_us: float = 10.0, ranges: bool = True, wait_us: float = 0.0) -> Trace:
    """Three steps of a product, the given kernels, and a norm, launched one by one; before each the CPU waits."""
    recorder, now = Recorder(), 0.0
    for step in range(3):
        begin = now
        now += wait_us
        for name in ("product", *attention, "norm"):
            recorder.kernel(now, now + 5, now + 5 + kernel_us, name=name)
            now += 20
        if ranges:
            recorder.range("attention", begin + wait_us + 15, now - 25, domain="")
            recorder.range(f"ProfilerStep#{step}", begin, now, domain="")
    return recorder.trace()


@pytest.mark.parametrize("seed", range(3))
def test_the_parts_add_up_to_the_difference_of_the_spans(seed: int) -> None:
    a, b = disorder(seed, ranks=2), disorder(seed + 10, ranks=2)
    found = compare_traces(a, b)
    spans = [int(budget(trace)["span_ns"].sum()) for trace in (a, b)]
    assert (found.a_ns, found.b_ns) == tuple(spans)
    for parts in (found.ranges, found.kernels):
        assert (parts["a_ns"].sum(), parts["b_ns"].sum()) == tuple(spans)
        assert parts["difference_ns"].sum() == spans[1] - spans[0]
        assert parts["change"].sum() == pytest.approx(spans[1] / spans[0] - 1)
        assert parts["difference_ns"].abs().is_monotonic_decreasing
    window = Selection(window_ns=(20_000, 60_000))
    part = compare_traces(a, b, window)
    assert part.a_ns == budget(a, window)["span_ns"].sum()


def test_kernels_in_the_same_place_are_compared_with_each_other() -> None:
    found = compare_traces(steps(("scores", "softmax", "values")), steps(("flash",), kernel_us=12.0))
    parts = found.kernels.set_index("name")
    assert parts.loc["scores -> flash", ["a_count", "b_count", "a_ns", "b_ns"]].tolist() == [9, 3, 90_000, 36_000]
    assert parts.loc["product", "difference_ns"] == 3 * 2_000
    assert not [name for name in parts.index if "nothing" in name]


def test_ranges_are_told_apart_by_their_paths_without_the_numbers_of_steps() -> None:
    found = compare_traces(steps(("flash",)), steps(("flash",), kernel_us=11.0))
    paths = found.ranges.set_index("name")
    assert {"ProfilerStep", "ProfilerStep/attention"} < set(paths.index)
    assert paths.loc["ProfilerStep/attention", ["a_count", "b_count", "difference_ns"]].tolist() == [3, 3, 3_000]
    without = compare_traces(steps(("flash",)), steps(("flash",), ranges=False))
    assert without.ranges.empty
    assert not without.kernels.empty


def test_idle_time_is_a_part_with_its_cause() -> None:
    found = compare_traces(steps(("flash",)), steps(("flash",), wait_us=100.0))
    worst = found.kernels.iloc[0]
    assert worst["name"] == "idle: host code"
    assert worst["difference_ns"] == pytest.approx(2 * 100_000, rel=0.01)  # nothing waits for the first launch


def test_where_idle_time_is_not_known_busy_time_is_compared() -> None:
    trace = steps(("flash",))
    calls = trace.calls.assign(name=trace.calls["name"].cat.rename_categories({"launch": "cudaGraphLaunch"}))
    lost = replace(trace, calls=calls.assign(correlation=calls["correlation"] + 100))
    found = compare_traces(trace, lost)
    assert found.a_ns == budget(trace)["busy_ns"].sum()
    assert "busy time is compared" in found.remarks[0]


def test_different_work_is_remarked_and_none_refused() -> None:
    found = compare_traces(steps(("flash",)), steps(("flash",) * 4))
    assert "do both do the same work?" in " ".join(found.remarks)
    with pytest.raises(TraceError, match="got no GPU operation in trace B"):
        compare_traces(steps(("flash",)), disorder(0, gpu=False))
