"""Tables of any trace agree with plain computations over every stretch of time, and with pandas."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from helpers.traces.handmade import Recorder, disorder
from helpers.traces.unstaged_traces import mixed, waiting

from labkit.nsys.tables.budget import budget
from labkit.nsys.tables.gaps import QUEUED, gaps, idle_by_cause
from labkit.nsys.tables.host_causes import ALLOCATED, HOST, SYNCHRONISED
from labkit.nsys.tables.kernel_names import brief
from labkit.nsys.tables.operations import calls, copies, kernels
from labkit.nsys.tables.ranges import ranges
from labkit.nsys.tables.selection import OPEN_NS, Selection
from labkit.nsys.tables.summary import summarise
from labkit.nsys.tables.work_kinds import COMMUNICATION, COMPUTE, COPY, KINDS_OF_WORK, work_kinds
from labkit.nsys.trace import Trace, TraceError
from labkit.system.errors import UserError

WINDOW = (20_000, 90_000)


def plain_budget(trace: Trace, process: int, window: tuple[int, int] | None) -> dict[str, int]:
    """Time by kind of work: adds up the stretches between all bounds of operations."""
    rows = trace.operations[(trace.operations["process"] == process).to_numpy()]
    kinds = work_kinds(trace.operations)[rows.index]
    opens, closes = int(rows["start_ns"].min()), int(rows["end_ns"].max())
    if window:
        opens, closes = max(opens, window[0]), min(closes, window[1])
    bounds = np.unique(np.clip(np.concatenate([rows["start_ns"], rows["end_ns"], [opens, closes]]), opens, closes))
    sums = dict.fromkeys((COMPUTE, COMMUNICATION, COPY, "idle"), 0)
    for low, high in pairwise(bounds.tolist()):
        running = kinds[((rows["start_ns"] <= low) & (rows["end_ns"] >= high)).to_numpy()]
        running_kind = next((kind for index, kind in enumerate(KINDS_OF_WORK) if index in running), "idle")
        sums[running_kind] += high - low
    return sums


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("seed", range(3))
def test_the_parts_of_a_budget_are_those_of_every_stretch_of_time(seed: int, window: tuple[int, int] | None) -> None:
    trace = mixed(seed)
    table = budget(trace, Selection(window_ns=window))
    assert table["rank"].tolist() == [0, 1]
    for row in table.to_dict("records"):
        plain = plain_budget(trace, row["process"], window)
        assert row["compute_ns"] == plain[COMPUTE]
        assert row["exposed_communication_ns"] == plain[COMMUNICATION]
        assert row["exposed_copy_ns"] == plain[COPY]
        assert row["idle_ns"] == plain["idle"]
        assert row["span_ns"] == sum(plain.values())
        if row["communication_ns"]:
            assert row["communication_hidden"] == pytest.approx(1 - plain[COMMUNICATION] / row["communication_ns"])


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("seed", range(3))
def test_gaps_and_their_causes_add_up_to_the_idle_time(seed: int, window: tuple[int, int] | None) -> None:
    trace = mixed(seed)
    selection = Selection(window_ns=window)
    table = gaps(trace, selection)
    idle = budget(trace, selection).set_index("rank")["idle_ns"]
    parts = table[["host_ns", "launch_ns", "latency_ns", "queued_ns", "unknown_ns"]]
    assert (parts >= 0).all(axis=None)
    assert (parts.sum(axis=1) == table["time_ns"]).all()
    assert table.groupby("rank")["time_ns"].sum().to_dict() == idle[idle > 0].to_dict()
    causes = idle_by_cause(table)
    assert causes.groupby("rank")["time_ns"].sum().to_dict() == idle[idle > 0].to_dict()
    assert np.allclose(causes.groupby("rank")["share"].sum(), 1)


@pytest.mark.parametrize(
    ("call", "start", "end", "cause", "awaited"),
    [
        ("cudaStreamSynchronize", 8, 22, SYNCHRONISED, "cudaStreamSynchronize"),  # the call is open when the gap begins
        ("cudaDeviceSynchronize", 30, 95, SYNCHRONISED, "cudaDeviceSynchronize"),
        ("cudaMalloc", 30, 95, ALLOCATED, "cudaMalloc"),
        ("cudaMalloc", 30, 40, HOST, "batch"),
        ("cudaEventRecord", 30, 95, "other CUDA calls", "cudaEventRecord"),
    ],
)
def test_a_gap_names_what_the_launching_thread_did(
    call: str, start: float, end: float, cause: str, awaited: str
) -> None:
    longest, shortest = gaps(waiting(call, start, end)).to_dict("records")
    assert (longest["time_ns"], longest["cause"], longest["awaited"]) == (85_000, cause, awaited)
    assert (longest["before"], longest["next"]) == ("first", "second")
    assert (longest["host_ns"], longest["launch_ns"], longest["latency_ns"]) == (80_000, 100, 4_900)
    assert (shortest["time_ns"], shortest["cause"], shortest["queued_ns"]) == (2_000, QUEUED, 2_000)


def test_idle_time_is_not_told_where_graphs_lack_their_kernels() -> None:
    trace = waiting("cudaGraphLaunch", 30, 95)
    table = budget(trace)
    assert table["idle_ns"].isna().all()
    assert table["graphs_unseen"].tolist() == [1]
    with pytest.raises(TraceError, match=r"1 launches of CUDA graphs without any of their kernels.*node"):
        gaps(trace)
    summary = summarise(trace)
    assert summary.idle.empty
    assert "idle time is not known" in " ".join(summary.remarks)


@pytest.mark.parametrize("seed", range(2))
def test_kernels_copies_and_calls_are_those_of_pandas(seed: int) -> None:
    trace = mixed(seed)
    rows = trace.operations.assign(time=trace.operations["end_ns"] - trace.operations["start_ns"])
    plain = rows[rows["kind"] == "kernel"].groupby("name", observed=True)["time"]
    table = kernels(trace).set_index("name")
    assert table["total_ns"].to_dict() == plain.sum().to_dict()
    assert table["median_ns"].to_dict() == plain.median().to_dict()
    assert table["share"].sum() == pytest.approx(1)
    assert table["total_ns"].is_monotonic_decreasing
    many = plain.size() >= 59
    assert (table["p95_ns"].notna() == many.reindex(table.index)).all()
    assert copies(trace)["count"].sum() == (rows["kind"] == "memcpy").sum()
    assert calls(trace)["count"].sum() == len(trace.calls)


def test_a_range_is_as_busy_as_its_part_of_the_gpu() -> None:
    recorder = Recorder()
    recorder.range("half", 0, 40, domain="")
    recorder.kernel(1, 10, 20)
    recorder.kernel(2, 40, 50)
    recorder.range("aten::mm, seq = 7, op_id = 9", 60, 70, domain="")
    recorder.kernel(61, 65, 75)
    (half, whole) = ranges(recorder.trace()).to_dict("records")
    assert (half["name"], half["total_ns"], half["busy_share"]) == ("half", 40_000, 0.5)
    assert (whole["name"], whole["total_ns"], whole["busy_share"]) == ("aten::mm", 10_000, 1.0)


def test_a_selection_takes_the_named_rows() -> None:
    trace = mixed(0)
    operations = trace.operations
    start, end = operations["start_ns"].to_numpy(), operations["end_ns"].to_numpy()
    within = Selection(window_ns=WINDOW).of(trace, "operations")
    assert (within == ((start < WINDOW[1]) & (np.maximum(end, start + 1) > WINDOW[0]))).all()
    assert (Selection(ranks=(1,)).of(trace, "operations") == (operations["process"] == 1)).all()
    assert (Selection(streams=(0, 2)).of(trace, "operations") == operations["stream"].isin([0, 2])).all()
    assert (Selection(name="NCCL").of(trace, "operations") == operations["name"].str.contains("nccl")).all()
    launched = Selection(range=r"mlp$").of(trace, "operations")
    called = Selection(range=r"mlp$").of(trace, "calls")
    expected = trace.calls[called & (trace.calls["correlation"] > 0)][["process", "correlation"]]
    assert sorted(map(tuple, operations[launched][["process", "correlation"]].to_numpy())) == sorted(
        map(tuple, expected.to_numpy())
    )


@pytest.mark.parametrize(
    ("selection", "says"),
    [
        (Selection(window_ns=(10**15, 10**16)), r"got the window 1e\+09 ms to 1e\+10 ms.*within 0\.\d+ to \d\.\d+ ms"),
        (Selection(window_ns=(10**15, OPEN_NS)), r"got the window 1e\+09 ms to the end, in which"),
        (Selection(name="kernels"), r"got the name 'kernels' \(did you mean 'kernel'\?\), which none of the 2 names"),
        (Selection(ranks=(7,)), "got rank 7, which has no GPU operations; expected one of 0, 1"),
        (Selection(streams=(9,)), "got stream 9.*expected one of 0, 1, 2"),
        (Selection(range="nowhere"), "got the range 'nowhere', which none of the"),
    ],
)
def test_a_selection_of_nothing_says_what_there_is(selection: Selection, says: str) -> None:
    with pytest.raises(TraceError, match=says):
        selection.of(mixed(0), "operations")


def test_a_selection_that_cannot_be_is_refused() -> None:
    with pytest.raises(UserError, match="got a window from 2 ms to 1 ms; expected an end after its start"):
        Selection(window_ns=(2_000_000, 1_000_000))
    with pytest.raises(UserError, match="expected a regular expression"):
        Selection(name="(").of(mixed(0), "operations")
    with pytest.raises(UserError, match="got the key 'streem' \\(did you mean 'stream'"):
        kernels(mixed(0), by=["streem"])


@pytest.mark.parametrize("trace", [disorder(0, gpu=False), Recorder().trace(), mixed(1)], ids=["cpu", "empty", "gpu"])
def test_a_summary_has_every_table_of_any_trace(trace: Trace) -> None:
    summary = summarise(trace)
    assert summary.contents["count"].sum() == len(trace.operations) + len(trace.calls) + len(trace.ranges)
    assert len(summary.budget) == (2 if trace.on_gpu else 0)
    assert any("no GPU work" in remark for remark in summary.remarks) == (not trace.on_gpu)


def test_processes_of_two_runs_are_remarked() -> None:
    recorder = Recorder()
    recorder.kernel(0, 5, 10)
    recorder.kernel(1000, 1005, 1010, process=1)
    remarks = summarise(recorder.trace(ranks=(0, 1))).remarks
    assert any("0.990 ms after others have ended: two runs" in remark for remark in remarks)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<(unsigned long)4096>)", "ncclDevKernel_SendRecv"),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_64x64_8x5_tn_align1>(T1::Params)",
         "Kernel2<cutlass_80_simt_sgemm_64x64_8x5_tn_align1>"),
        ("void at::native::reduce_kernel<(int)512, (int)1, at::native::ReduceOp<float, at::native::MeanOps<float>>>(T)",
         "reduce_kernel<MeanOps>"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float, float, float, "
         "at::native::binary_internal::MulFunctor<float> >, std::array<char*, 3ul> >(int)",
         "vectorized_elementwise_kernel<MulFunctor>"),
        ("Cijk_Alik_Bljk_SB", "Cijk_Alik_Bljk_SB"),
        ("", ""),
    ],
)  # fmt: skip
def test_a_short_name_of_a_kernel_tells_what_it_does(name: str, short: str) -> None:
    assert brief(name) == short
