"""Steps are found with and without ranges around them; a step has the time that it adds to the run."""

import numpy as np
import pytest
from helpers.traces.handmade import FUSED, VANILLA, Recorder, decode, layers

from labkit.nsys.analysis.attribution import attribute
from labkit.nsys.analysis.steps import CPU, GPU, steps
from labkit.nsys.trace import Trace, TraceError
from labkit.stages import Phase


@pytest.mark.parametrize("gpu", [True, False])
def test_every_step_is_found_with_its_place(gpu: bool) -> None:
    table = steps(decode(layers(VANILLA, 2), steps=5, gpu=gpu))
    assert table["phase"].eq(Phase.DECODE).all()
    assert table["index"].tolist() == [0, 1, 2, 3, 4]
    assert table["clock"].eq(GPU if gpu else CPU).all()
    assert (table["duration_ns"] == table["end_ns"] - table["start_ns"]).all()


@pytest.mark.parametrize("gpu", [True, False])
def test_steps_follow_from_embeddings_where_no_range_is_around_them(gpu: bool) -> None:
    whole, bare = (decode(VANILLA, steps=5, gpu=gpu, step_ranges=ranges, noise=0.1) for ranges in (True, False))
    table, expected = steps(bare), steps(whole)
    assert table["duration_ns"].tolist() == expected["duration_ns"].tolist()
    assert table["start_ns"].tolist() == expected["start_ns"].tolist()


def test_without_an_embedding_a_step_begins_where_the_first_stage_comes_again() -> None:
    stages = {name: does for name, does in VANILLA.items() if name != "embed"}
    assert len(steps(decode(stages, steps=5, gpu=False, step_ranges=False))) == 5


def test_steps_on_a_gpu_tile_the_run() -> None:
    """A step lasts from its first operation to the first operation of the next step. The CPU does not count."""
    trace = decode(layers(VANILLA, 3), steps=6, noise=0.2)
    table = steps(trace)
    assert table["start_ns"].iloc[1:].tolist() == table["end_ns"].iloc[:-1].tolist()
    step_of_operation = attribute(trace).step_of_operation
    first = [trace.operations["start_ns"][step_of_operation == row].min() for row in table["range"]]
    assert table["start_ns"].tolist() == first


def test_a_gpu_that_lags_far_after_its_launches_gives_each_step_its_time() -> None:
    """Three steps are launched within 30 us; the GPU takes 100 us for each."""
    recorder = Recorder()
    for step in range(3):
        recorder.range("decode/step", 10 * step, 10 * step + 9)
        recorder.range("decode/embed", 10 * step + 1, 10 * step + 3)
        recorder.kernel(10 * step + 2, 5 + 100 * step, 105 + 100 * step)
    table = steps(recorder.trace())
    assert table["duration_ns"].tolist() == [100_000] * 3
    assert table["whole"].tolist() == [True, True, False]


def test_the_last_step_ends_with_its_range_or_its_last_operation() -> None:
    for range_end, expected_end in ((40, 40), (9, 30)):
        recorder = Recorder()
        recorder.range("decode/step", 0, range_end)
        recorder.range("decode/embed", 1, 3)
        recorder.kernel(2, 5, 30)
        assert steps(recorder.trace())["end_ns"].tolist() == [1000 * expected_end]


def test_a_prompt_after_the_last_token_of_another_run_does_not_prolong_its_step() -> None:
    recorder = Recorder()
    for name, start, end in (("prefill", 0, 50), ("decode", 50, 60), ("prefill", 9000, 9050), ("decode", 9050, 9061)):
        recorder.range(f"{name}/step", start, end)
        recorder.range(f"{name}/embed", start + 1, start + 4)
        recorder.kernel(start + 2, start + 3, end - 1)
    table = steps(recorder.trace())
    assert table["duration_ns"].tolist() == [50_000, 7_000, 50_000, 8_000]
    assert table["whole"].tolist() == [True, False, True, False]
    assert table["index"].tolist() == [0, 0, 1, 1]


def test_every_rank_has_its_own_steps() -> None:
    recorder = Recorder()
    for process in (0, 1):
        for step in range(3):
            recorder.range("decode/step", 100 * step + process, 100 * step + 90, process=process)
    table = steps(recorder.trace(ranks=(1, 0)))
    assert table["rank"].tolist() == [1, 1, 1, 0, 0, 0]
    assert table["index"].tolist() == [0, 1, 2] * 2


def test_steps_without_gpu_work_are_left_out_of_a_gpus_steps() -> None:
    recorder = Recorder()
    for step in range(3):
        recorder.range("decode/step", 100 * step, 100 * step + 90)
        if step != 1:
            recorder.kernel(100 * step + 10, 100 * step + 20, 100 * step + 80)
    table = steps(recorder.trace())
    assert table["index"].tolist() == [0, 2]
    assert table["duration_ns"].tolist() == [70_000, 70_000]


def test_gpu_work_that_no_step_launched_leaves_the_steps_to_the_cpu() -> None:
    recorder = Recorder()
    recorder.range("decode/step", 0, 90)
    recorder.kernel(200, 210, 300)
    assert steps(recorder.trace())["clock"].tolist() == [CPU]


@pytest.mark.parametrize("name", ["", "decode/layer.one/qkv"])
def test_a_trace_without_ranges_of_labkit_says_how_to_get_them(name: str) -> None:
    recorder = Recorder()
    if name:
        recorder.range(name, 0, 1)
        recorder.range("decode/step", 0, 1, domain="other")
    with pytest.raises(TraceError, match=r"made.sqlite: no range of labkit .*labkit doctor"):
        steps(recorder.trace())


def test_a_phase_alone_is_no_step() -> None:
    recorder = Recorder()
    recorder.range("decode", 0, 1)
    with pytest.raises(TraceError, match="but none of a step or a stage"):
        steps(recorder.trace())


def test_a_fast_side_has_shorter_steps() -> None:
    def mean(trace: Trace) -> float:
        return float(np.mean(steps(trace)["duration_ns"]))

    assert mean(decode(FUSED)) < mean(decode(VANILLA))
