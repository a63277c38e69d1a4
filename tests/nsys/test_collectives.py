"""Waiting is attributed to the rank that came last, and only matched collectives are compared."""

from collections.abc import Sequence

import pandas as pd
import pytest
from helpers.traces.handmade import Recorder, decode, disorder

from labkit.nsys.analysis.collectives import collectives
from labkit.nsys.trace import Trace, TraceError

STEPS, LAYERS = 3, 2
ENDS = 30  # end of a collective, in us after its time of arrival


def run(late_us: Sequence[float], *, kernel: str = "", ranges: bool = True, ranks: Sequence[int] = ()) -> Trace:
    """Trace of ranks that arrive `late_us` late at each all-reduce, which ends 30 us after the time of arrival.

    kernel: name of the all-reduce's kernel; empty: it runs on the CPU. ranges: whether a range announces it.
    """
    recorder = Recorder()
    for process, late in enumerate(late_us):
        for step in range(STEPS):
            begin = 200 * step
            recorder.range("decode/step", begin, begin + 199, process=process)
            for layer in range(LAYERS):
                arrival = begin + 50 + 80 * layer
                start, end = arrival + late, arrival + ENDS
                if ranges:
                    recorder.range(f"decode/layer.{layer}/all_reduce", arrival - 5, end, process=process)
                if kernel:
                    recorder.kernel(arrival - 4, start, end, process=process, name=kernel, device=process)
                elif late:
                    recorder.ranges[-1]["start_ns"] = round(1000 * start)
                else:
                    recorder.ranges[-1]["start_ns"] = 1000 * arrival
    return recorder.trace(ranks=ranks or range(len(late_us)))


@pytest.mark.parametrize(
    ("kernel", "ranges"),
    [("", True), ("any", True), ("ncclDevKernel", False), ("cross_device_reduce_1stage", False)],
)
def test_everybody_waits_for_the_last(kernel: str, ranges: bool) -> None:
    result = collectives(run([0, 7, 3], kernel=kernel, ranges=ranges))
    count = STEPS * LAYERS
    assert result.ranks["collectives"].tolist() == [count] * 3
    assert result.ranks["last"].tolist() == [0, count, 0]
    assert result.ranks["wait_ms"].tolist() == pytest.approx([count * 0.007, 0, count * 0.004])
    assert result.ranks["transfer_ms"].tolist() == pytest.approx([count * 0.023] * 3)
    assert result.ranks["mostly_for"].tolist() == [1, pd.NA, 1]
    assert result.waits_ms[1].tolist() == result.ranks["wait_ms"].tolist()
    assert not result.waits_ms[[0, 2]].any(axis=None)
    assert result.frame["skew_ns"].eq(7000).all()


def test_each_collective_is_matched_by_phase_step_layer_and_order() -> None:
    frame = collectives(run([0, 2])).frame
    assert frame.groupby(["phase", "step", "layer", "order"])["rank"].agg(list).map(sorted).tolist() == [[0, 1]] * 6
    assert frame["layer"].unique().tolist() == [0, 1]
    assert frame["step"].unique().tolist() == [0, 1, 2]


def test_two_all_reduces_of_a_layer_keep_their_order() -> None:
    recorder = Recorder()
    for process, first_late, second_late in ((0, 0, 5), (1, 4, 0)):
        recorder.range("decode/step", 0, 100, process=process)
        recorder.range("decode/layer.0/all_reduce", 10 + first_late, 30, process=process)
        recorder.range("decode/layer.0/all_reduce", 50 + second_late, 70, process=process)
    result = collectives(recorder.trace(ranks=(0, 1)))
    assert result.frame["order"].tolist() == [0, 0, 1, 1]
    assert result.waits_ms.to_numpy().tolist() == [[0, 0.004], [0.005, 0]]


def test_a_collective_without_partners_is_left_out_and_remarked() -> None:
    trace = run([0, 2])
    unmatched = trace.ranges["process"].eq(1) & trace.ranges["name"].eq("decode/layer.1/all_reduce")
    without_one = Trace(
        trace.source, ranges=trace.ranges.drop(index=unmatched[unmatched].index[-1:]), processes=trace.processes
    )
    result = collectives(without_one)
    assert result.ranks["collectives"].tolist() == [5, 5]
    assert any("1 of 11 arrivals have no partner" in remark for remark in result.remarks)


def test_unknown_ranks_are_numbered() -> None:
    result = collectives(run([0, 2], ranks=(-1, -1)))
    assert result.ranks.index.tolist() == [0, 1]
    assert any("not known" in remark for remark in result.remarks)


def test_clocks_that_do_not_line_up_are_remarked() -> None:
    trace = run([0, 2])
    shifted = trace.ranges.assign(start_ns=trace.ranges["start_ns"] + 10**9 * trace.ranges["process"])
    shifted["end_ns"] += 10**9 * trace.ranges["process"]
    result = collectives(Trace(trace.source, ranges=shifted, processes=trace.processes))
    assert any("do not line up" in remark for remark in result.remarks)


def test_remarks_of_the_reader_about_clocks_are_repeated() -> None:
    recorder = Recorder()
    for process in (0, 1):
        recorder.range("decode/step", 0, 100, process=process)
        recorder.range("decode/layer.0/all_reduce", 10, 30, process=process)
    remark = "rank 1's clock could not be aligned"
    assert remark in collectives(recorder.trace(ranks=(0, 1), skipped=(remark, "a table"))).remarks


@pytest.mark.parametrize("trace", [run([0]), decode({}, steps=2)], ids=["one rank", "no collectives"])
def test_fewer_than_two_ranks_are_refused(trace: Trace) -> None:
    with pytest.raises(TraceError, match="at least 2 ranks: read the reports of all"):
        collectives(trace)


def test_collectives_of_other_steps_are_refused() -> None:
    recorder = Recorder()
    for process, layer in ((0, 0), (1, 1)):
        recorder.range("decode/step", 0, 100, process=process)
        recorder.range(f"decode/layer.{layer}/all_reduce", 10, 30, process=process)
    with pytest.raises(TraceError, match="but none has a partner"):
        collectives(recorder.trace(ranks=(0, 1)))


@pytest.mark.parametrize("seed", range(8))
def test_in_any_disorder_the_last_never_waits_and_skew_is_the_longest_wait(seed: int) -> None:
    frame = collectives(disorder(seed, ranks=3)).frame
    groups = frame.groupby(["phase", "step", frame["layer"].fillna(-1), "order"])
    assert groups["last"].sum().eq(1).all()
    assert frame.loc[frame["last"], "wait_ns"].eq(0).all()
    assert (groups["wait_ns"].max() == groups["skew_ns"].first()).all()
