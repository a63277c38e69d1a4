"""The largest losses are proved and disjoint, and each says where to look at it."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest
from helpers.traces.handmade import Recorder, disorder
from helpers.traces.unstaged_traces import exchange, mixed, steps, waiting

from labkit.nsys.tables.budget import budget
from labkit.nsys.tables.gaps import gaps
from labkit.nsys.tables.host_causes import HOST
from labkit.nsys.tables.losses import HELPS, HELPS_PYTORCH, losses, sentence
from labkit.nsys.tables.rank_waits import rank_waits
from labkit.nsys.tables.summary import summarise
from labkit.nsys.trace import Trace
from labkit.system.asked_from import from_command_line


def losses_of(trace: Trace) -> list[dict]:
    return losses(trace, idle=gaps(trace)).to_dict("records")


@pytest.mark.parametrize("seed", range(4))
def test_losses_are_disjoint_parts_of_the_span(seed: int) -> None:
    trace = mixed(seed)
    table = summarise(trace).losses
    spans = budget(trace).set_index(["rank", "device"])["span_ns"]
    assert len(table) <= 3
    assert table["share"].is_monotonic_decreasing
    for device, rows in table.groupby(["rank", "device"]):
        lost = spans[device] - budget(trace).set_index(["rank", "device"]).loc[device, "compute_ns"]
        assert rows["time_ns"].sum() <= lost
        assert rows["share"].to_numpy() == pytest.approx((rows["time_ns"] / spans[device]).to_numpy(), abs=1e-6)


@pytest.mark.parametrize(
    ("call", "loss", "helps"),
    [
        ("cudaStreamSynchronize", "idle, because the host waited for the GPU", "cudaStreamSynchronize"),
        ("cudaMalloc", "idle, while the host allocated memory", "allocated once"),
        ("cudaEventRecord", "idle, waiting for the host", "CUDA graphs"),
    ],
)
def test_idle_time_is_lost_to_what_the_host_did(call: str, loss: str, helps: str) -> None:
    worst = losses_of(waiting(call, 25, 95))[0]
    assert worst["loss"] == loss
    assert helps in worst["helps"]
    assert "'batch'" in worst["evidence"]
    assert "second" in worst["evidence"]
    assert (worst["start_ns"], worst["end_ns"]) == (20_000, 105_000)
    assert "look at Selection(window_ns=(20000, 105000))" in sentence(worst)
    with from_command_line():
        assert "look at --window 0.020:0.105" in sentence(worst)


def test_tiny_kernels_are_told_from_long_waits() -> None:
    recorder = Recorder()
    for index in range(200):
        recorder.kernel(index * 0.2, 50 + 10 * index, 54 + 10 * index, name="tiny")
    (tiny,) = losses_of(recorder.trace())
    assert tiny["loss"] == "idle before kernels shorter than 10 µs"
    assert tiny["time_ns"] == 199 * 6_000
    recorder.kernel(60, 20_000, 20_005, name="tiny")
    assert [row["loss"] for row in losses_of(recorder.trace())] == [
        "idle, for reasons that the trace does not tell",
        "idle before kernels shorter than 10 µs",
    ]


def test_copies_that_run_alone_are_lost() -> None:
    recorder = Recorder()
    recorder.kernel(0, 5, 50)
    recorder.kernel(1, 50, 100, name="HtoD")
    recorder.operations[-1] |= {"kind": "memcpy", "bytes": 3_000_000, "memory": "Pageable -> Device"}
    (copy,) = losses_of(recorder.trace())
    assert (copy["loss"], copy["time_ns"]) == ("copies while no kernel runs", 50_000)
    assert "3.0 MB of pageable memory" in copy["evidence"]
    assert copy["helps"] == HELPS["pageable"]
    recorder.operations[-1] |= {"memory": "Pinned -> Device"}
    (copy,) = losses_of(recorder.trace())
    assert copy["helps"] == HELPS["copy"]
    assert not {"pinned", "pageable"} & set((copy["helps"] + copy["evidence"]).lower().split())


def test_advice_is_for_what_the_program_is_written_in() -> None:
    recorder = Recorder()
    recorder.kernel(0, 5, 10)
    recorder.kernel(99, 99.2, 110)
    (native,) = losses_of(recorder.trace())
    assert native["helps"] == HELPS[HOST]
    assert "torch" not in str(HELPS).lower()
    recorder.operator("aten::mm", 98, 100)
    (python,) = losses_of(recorder.trace())
    assert python["helps"] == HELPS_PYTORCH[HOST]


def test_a_first_launch_that_loads_code_wants_a_warm_up() -> None:
    recorder = Recorder()
    recorder.kernel(0, 5, 10, name="known")
    recorder.kernel(11, 200, 210, name="new")
    recorder.calls[-1] |= {"end_ns": 199_000}
    (first,) = losses_of(recorder.trace())
    assert (first["loss"], first["helps"]) == ("idle, while kernels were launched for the first time", HELPS["first"])


def test_a_straggler_is_named_with_its_range() -> None:
    trace = exchange(steps(by_us=100.0))
    waits = rank_waits(trace)
    table = losses(trace, waits=waits).set_index("loss")
    late = table.loc["waiting for rank 1"]
    assert late["rank"] != 1
    assert late["time_ns"] == pytest.approx(waits.frame["skew_ns"].sum(), rel=0.01)
    assert "rank 1 arrives last" in late["evidence"]


@pytest.mark.parametrize("trace", [disorder(0, gpu=False), Recorder().trace()], ids=["cpu", "empty"])
def test_without_a_gpu_nothing_is_lost_that_could_be_proved(trace: Trace) -> None:
    assert summarise(trace).losses.empty


def test_unknown_idle_time_is_no_loss() -> None:
    trace = waiting("cudaGraphLaunch", 30, 95)
    assert isinstance(losses(replace(trace)), pd.DataFrame)
    assert not [loss for loss in losses(trace)["loss"] if loss.startswith("idle")]
