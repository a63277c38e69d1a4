"""The stage table counts all time once and says what is unknown."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from helpers.sweeps import swept
from helpers.traces.handmade import VANILLA, Recorder, decode, disorder, layers

from labkit.nsys.analysis.attribution import attribute
from labkit.nsys.analysis.stage_table import IDLE, NO_STAGE, ORDER, stage_table
from labkit.nsys.analysis.steps import steps
from labkit.nsys.trace import Trace, TraceError, typed

WHOLE = pytest.approx(1.0, abs=1e-12)


def by_stage(trace: Trace) -> pd.DataFrame:
    return stage_table(trace, ("stage",)).frame.set_index("stage")


def one_step(*, gpu: bool = True) -> Recorder:
    """A step from 0 to 100 us whose first operation starts at 5 and whose last one ends at 100."""
    recorder = Recorder()
    recorder.range("decode/step", 0, 100)
    if gpu:
        recorder.range("decode/embed", 0, 2)
        recorder.kernel(1, 5, 10)
    return recorder


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize("seed", swept(range(8), ["0", "3"]))
def test_the_shares_of_each_scope_add_up_to_the_steps(seed: int, gpu: bool) -> None:
    trace = disorder(seed, ranks=1 + seed % 3, gpu=gpu)
    mean_ms = steps(trace)["duration_ns"].mean() / 1e6
    for by in (("stage",), ("phase", "layer", "stage"), ("rank", "phase", "stage"), ("process", "stage")):
        frame = stage_table(trace, by).frame
        scopes = frame.groupby([name for name in by if name not in ("layer", "stage")] or (lambda row: 0))
        assert scopes["share"].sum().tolist() == [WHOLE] * scopes.ngroups
        assert (frame["share"] >= 0).all()
        if "rank" not in by and "process" not in by:
            assert frame["step_ms"].sum() == pytest.approx(mean_ms)


@pytest.mark.parametrize("gpu", [True, False])
def test_a_stage_has_its_runs_and_operations(gpu: bool) -> None:
    trace = decode(layers(VANILLA, 3), steps=5, gpu=gpu, operators=not gpu)
    frame = by_stage(trace)
    assert frame.loc["attention", "count"] == 15
    assert frame.loc["attention", "operations"] == 18
    assert frame.loc["lm_head", ["count", "operations"]].tolist() == [5, 1]
    row = stage_table(trace).frame.query("layer == 2 and stage == 'attention'").iloc[0]
    assert row[["count", "operations"]].tolist() == [5, 6]


def test_the_rows_come_in_the_order_of_a_step() -> None:
    frame = stage_table(decode(layers(VANILLA, 3), steps=2)).frame
    first, last = frame["stage"].tolist()[:1], frame["stage"].tolist()[-4:]
    assert first + last == ["embed", "lm_head", "sample", NO_STAGE, IDLE]
    layer = frame["layer"].dropna().tolist()
    assert layer == sorted(layer)
    places = frame.loc[frame["layer"] == 1, "stage"].map(ORDER)
    assert places.is_monotonic_increasing


def test_times_of_a_gpu_stage() -> None:
    recorder = one_step()
    recorder.range("decode/layer.0/qkv", 3, 9)
    for called, start, end in ((4, 20, 30), (5, 40, 45), (6, 45, 60)):
        recorder.kernel(called, start, end)
    recorder.kernel(50, 62, 100)  # in no stage
    frame = by_stage(recorder.trace())
    row = frame.loc["qkv"]
    assert row["total_ms"] == row["median_ms"] == pytest.approx(0.040)
    assert row["gpu_busy_ms"] == pytest.approx(0.030)
    assert row["launch_gap_ms"] == pytest.approx(0.010)
    assert row["share"] == pytest.approx(30 / 95)
    assert frame.loc[IDLE, "step_ms"] == pytest.approx(0.022)
    assert frame.loc[NO_STAGE, "step_ms"] == pytest.approx(0.038)


def test_a_gap_that_another_stage_fills_does_not_count() -> None:
    recorder = one_step()
    recorder.range("decode/layer.0/qkv", 3, 9)
    recorder.range("decode/layer.0/mlp", 10, 19)
    recorder.kernel(4, 20, 30)
    recorder.kernel(5, 40, 60)
    recorder.kernel(11, 28, 38, stream=8)
    frame = by_stage(recorder.trace())
    assert frame.loc["qkv", "launch_gap_ms"] == pytest.approx(0.002)


def test_time_of_two_stages_counts_for_the_one_that_began_first() -> None:
    recorder = one_step()
    recorder.range("decode/layer.0/qkv", 3, 9)
    recorder.range("decode/layer.0/mlp", 10, 19)
    recorder.kernel(4, 20, 40)
    recorder.kernel(11, 30, 70, stream=8)
    frame = by_stage(recorder.trace())
    assert frame.loc[["qkv", "mlp"], "step_ms"].tolist() == pytest.approx([0.020, 0.030])
    assert frame.loc[["qkv", "mlp"], "gpu_busy_ms"].tolist() == pytest.approx([0.020, 0.040])
    assert frame["share"].sum() == WHOLE


def test_only_communication_without_concurrent_computing_is_exposed() -> None:
    recorder = one_step()
    recorder.range("decode/layer.0/mlp", 3, 9)
    recorder.range("decode/layer.0/all_reduce", 10, 19)
    recorder.kernel(4, 20, 40)
    recorder.kernel(11, 30, 70, stream=8)
    recorder.kernel(60, 75, 90, name="ncclDevKernel_AllGather", stream=8)
    recorder.kernel(61, 80, 100, device=1)  # work of another device hides nothing
    frame = by_stage(recorder.trace())
    assert frame.loc["all_reduce", "exposed_ms"] == pytest.approx(0.030)
    assert frame.loc[NO_STAGE, "exposed_ms"] == pytest.approx(0.015)
    assert frame.loc["mlp", "exposed_ms"] == 0


def test_gpu_busy_gaps_and_exposed_time_are_of_a_step_as_step_ms_is() -> None:
    recorder = Recorder()
    for step in range(3):
        begin = 1000 * step
        recorder.range("decode/step", begin, begin + 500)
        recorder.range("decode/layer.0/mlp", begin + 3, begin + 9)
        recorder.range("decode/layer.0/all_reduce", begin + 10, begin + 19)
        for called, start, end in ((4, 20, 30), (5, 40, 45), (11, 50, 70)):
            recorder.kernel(begin + called, begin + start, begin + end)
    frame = by_stage(recorder.trace())
    assert frame.loc["all_reduce", ["count", "operations"]].tolist() == [3, 1]
    assert frame.loc["all_reduce", "step_ms"] == frame.loc["all_reduce", "exposed_ms"] == pytest.approx(0.020)
    assert frame.loc["mlp", "gpu_busy_ms"] == pytest.approx(0.015)
    assert frame.loc["mlp", "launch_gap_ms"] == pytest.approx(0.010)
    assert frame.loc["mlp", "total_ms"] == pytest.approx(3 * 0.025)


def test_on_a_cpu_a_nested_stage_counts_once() -> None:
    recorder = one_step(gpu=False)
    recorder.range("decode/layer.0/attn_out", 10, 60)
    recorder.range("decode/layer.0/all_reduce", 30, 50)
    frame = by_stage(recorder.trace())
    assert frame.loc[["attn_out", "all_reduce", IDLE], "step_ms"].tolist() == pytest.approx([0.030, 0.020, 0.050])
    assert frame.loc["all_reduce", "exposed_ms"] == pytest.approx(0.020)
    assert frame[["gpu_busy_ms", "launch_gap_ms"]].isna().all(axis=None)
    assert NO_STAGE not in frame.index


def test_operators_that_others_called_are_not_counted() -> None:
    recorder = one_step(gpu=False)
    recorder.range("decode/layer.0/qkv", 10, 60)
    for start, end in ((12, 40), (12, 30), (15, 20), (41, 50)):
        recorder.operator("aten::linear", start, end)
    assert by_stage(recorder.trace()).loc["qkv", "operations"] == 2


def test_p95_says_whether_it_is_a_bound() -> None:
    bounds = [by_stage(decode(VANILLA, steps=count, noise=0.1)).loc["qkv"] for count in (58, 59)]
    assert [row["enough_for_p95"] for row in bounds] == [False, True]
    assert all(row["p95_ms"] >= row["median_ms"] for row in bounds)


def test_ranks_are_told_apart_or_averaged() -> None:
    trace = disorder(3, ranks=2)
    apart, together = stage_table(trace, ("rank", "phase", "stage")), stage_table(trace, ("phase", "stage"))
    assert apart.frame["rank"].unique().tolist() == [0, 1]
    assert not any("ranks" in remark for remark in apart.remarks)
    assert any("mean of 2 ranks" in remark for remark in together.remarks)


def test_the_coverage_and_the_source_go_along() -> None:
    trace = disorder(1)
    table = stage_table(trace)
    assert table.coverage == attribute(trace).coverage
    assert table.source is trace.source
    assert table.clock == "GPU"
    assert sum(table.step_count.values()) == len(steps(trace))


def test_graphs_traced_whole_are_remarked() -> None:
    recorder = one_step()
    recorder.kernel(50, 62, 100, name="graph", kind="graph")
    table = stage_table(recorder.trace())
    assert any("--cuda-graph-trace=node" in remark for remark in table.remarks)
    assert any("belongs to a stage" in remark for remark in table.remarks)
    assert table.frame.set_index("stage").loc[NO_STAGE, "step_ms"] == pytest.approx(0.038)


def test_kernels_of_a_graph_have_the_stage_that_they_were_captured_in() -> None:
    """The graph is captured in the first step and replayed in two others, by one launch each outside all stages."""
    recorder = Recorder()
    recorder.range("decode/step", 0, 50)
    recorder.range("decode/layer.0/qkv", 5, 15)
    recorder.range("decode/layer.0/mlp", 20, 30)
    recorder.kernel(40, 41, 45)
    for begin in (100, 200):
        recorder.range("decode/step", begin, begin + 50)
        for start, end, node in ((10, 20, 71), (20, 28, 72), (30, 50, 73)):
            recorder.kernel(begin + 5, begin + start, begin + end, graph_node=node)
    nodes = {"node": [71, 72, 73], "start_ns": [6000, 7000, 21000], "process": [0] * 3, "tid": [1] * 3}
    frame = by_stage(replace(recorder.trace(), graph_nodes=typed("graph_nodes", nodes)))
    assert frame.loc["qkv", ["count", "operations"]].tolist() == [2, pytest.approx(4 / 3)]
    assert frame.loc["qkv", ["total_ms", "median_ms"]].tolist() == pytest.approx([0.036, 0.018])
    assert frame.loc["mlp", ["total_ms", "median_ms"]].tolist() == pytest.approx([0.040, 0.020])
    assert frame.loc[NO_STAGE, "total_ms"] == pytest.approx(0.004)


def test_operations_and_ranges_that_end_before_they_start_take_no_time() -> None:
    trace = disorder(2)
    for name in ("operations", "ranges"):
        frame = getattr(trace, name).copy()
        wrong = np.arange(len(frame)) % 5 == 3
        if name == "ranges":
            wrong &= ~frame["name"].eq("decode/step").to_numpy()
        frame.loc[wrong, "end_ns"] = frame.loc[wrong, "start_ns"] - 700
        trace = replace(trace, **{name: frame})
    frame = stage_table(trace).frame
    assert frame["share"].sum() == WHOLE
    assert (frame.select_dtypes("number") >= 0).all(axis=None)


def test_warm_up_is_remarked_and_counted() -> None:
    table = stage_table(decode(VANILLA, steps=12, gpu=False, first_us=4000), ("phase", "stage"))
    assert any("the first step of 12" in remark and "counted" in remark for remark in table.remarks)
    assert table.frame.set_index("stage").loc[IDLE, "total_ms"] == pytest.approx(4.0)


def test_skipped_parts_of_the_trace_are_remarked() -> None:
    assert "something" in stage_table(one_step().trace(skipped=("something",))).remarks


def test_gpu_work_that_no_step_launched_is_remarked() -> None:
    recorder = one_step(gpu=False)
    recorder.range("decode/embed", 1, 3)
    recorder.kernel(200, 210, 300)
    table = stage_table(recorder.trace())
    assert table.clock == "CPU"
    assert any("no GPU operation belongs to a step" in remark for remark in table.remarks)


@pytest.mark.parametrize("by", [("phase",), ("stage", "stage"), ("stage", "kernel"), ()])
def test_an_unknown_grouping_is_refused(by: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="expected stage and any of rank, process, phase, layer"):
        stage_table(decode(VANILLA, steps=1), by)


def test_a_trace_without_ranges_of_labkit_is_refused() -> None:
    recorder = Recorder()
    recorder.kernel(1, 2, 3)
    with pytest.raises(TraceError, match="no range of labkit"):
        stage_table(recorder.trace())


def test_no_figure_is_missing() -> None:
    frame = stage_table(disorder(5, ranks=2), ("rank", "phase", "layer", "stage")).frame
    assert not frame.drop(columns="layer").isna().any(axis=None)
    assert np.isfinite(frame.select_dtypes("float").to_numpy()).all()
