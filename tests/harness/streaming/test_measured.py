"""Batches that the real engine generates within a memory budget, in a process of its own, with its stream's spans."""

import sys
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from helpers.processes.children import children_that_run
from helpers.studies.streaming_plans import point, saved_model, spans, tight_gb
from helpers.sweeps import sweep

from labkit.harness.stream_record import Overlapped
from labkit.harness.streaming import measured
from labkit.harness.streaming.epoch import FEWEST_TURNS
from labkit.harness.streaming.make import plan_streaming
from labkit.harness.streaming.measure import _still_grows, typical_rates
from labkit.harness.streaming.measured import measured_plan
from labkit.harness.streaming.plan import StreamingPlan
from labkit.harness.streaming.records import LayerSpan, MemorySample
from labkit.harness.streaming.spans import MOST_STEPS, hidden_share, run_spans
from labkit.kernels.layer_stream import StreamSpan
from labkit.system.errors import RunError, UserError
from labkit.system.interrupts import interrupt

SIZES: dict[str, Any] = {"prompt": 6, "new": 6, "slots": 2, "threads": 1, "precision": "float32"}
Measured = tuple[StreamingPlan, tuple[MemorySample, ...]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("streamed")


def planned(folder: Path, extra_layers: float = 2.5) -> StreamingPlan:
    model = folder / "model"
    if not model.exists():
        saved_model(model)
    memory_gb = tight_gb(model, extra_layers, **SIZES)
    return plan_streaming(str(model), memory_gb=memory_gb, path=folder, **SIZES)


@pytest.fixture(scope="module")
def measured_result(folder: Path) -> Measured:
    labels: list[str] = []
    progress = lambda done, total, label: labels.append(label)  # noqa: E731
    result = measured_plan(planned(folder), path=folder, rounds=2, progress=progress)
    assert labels[:3] == ["packing the weights, once", "batch 1, epoch 1 of 2", "batch 1, epoch 2 of 2"]
    return result


@sweep
def test_each_batch_has_the_layers_in_memory_that_were_planned(measured_result: Measured) -> None:
    plan, _ = measured_result
    assert plan.points[0].batch == 1
    assert plan.points[0].resident_layers >= 2
    for measured_point in plan.points:
        step = plan.step(measured_point.batch)
        assert measured_point.resident_layers >= step.resident_layers  # the plan leaves room for every layout
        assert 0 < measured_point.streamed_bytes <= step.streamed_bytes
        assert len(measured_point.epochs) == 2
        for epoch in measured_point.epochs:
            assert len(epoch.turns) >= FEWEST_TURNS
            assert all(turn.disk_gb_s > 0 and turn.gflop_s > 0 for turn in epoch.turns)
        generations = sum(len(epoch.prompts_ms) for epoch in measured_point.epochs)
        counted = len(measured_point.decode_ms) + len(measured_point.turns)  # without and with the first of each turn
        assert generations * (SIZES["new"] - 1) - (SIZES["new"] - 2) <= counted <= generations * (SIZES["new"] - 1)
        assert measured_point.peak_bytes <= plan.memory
    assert plan.points[-1].batch == plan.largest_batch or not _still_grows(plan.points)
    assert (plan.rates.disk_gb_s, plan.rates.gflop_s) == typical_rates(plan.points)


@sweep
def test_memory_is_told_over_time_for_each_batch(measured_result: Measured) -> None:
    plan, memory = measured_result
    assert all(earlier.second < later.second for earlier, later in pairwise(memory))
    assert [*dict.fromkeys(sample.batch for sample in memory)] == [
        measured_point.batch for measured_point in plan.points
    ]
    assert max(sample.bytes for sample in memory) <= plan.memory


@sweep
def test_spans_know_their_slots(measured_result: Measured) -> None:
    """In a real run every layer is read before it is computed, and no slot is overwritten during that."""
    plan, _ = measured_result
    measured_point = plan.points[0]
    layers = plan.footprint.layers
    computed = [span for span in measured_point.spans if span.kind == "compute"]
    assert [span.layer for span in computed] == [*range(layers)] * MOST_STEPS
    assert [span.step for span in computed] == [step for step in range(MOST_STEPS) for _ in range(layers)]
    assert sum(span.slot is None for span in computed) == MOST_STEPS * measured_point.resident_layers
    every_read = [span for span in measured_point.spans if span.kind == "read"]
    reads = [span for span in every_read if span.step < MOST_STEPS]
    assert len(reads) == MOST_STEPS * (layers - measured_point.resident_layers) - plan.case.slots
    for read in reads:
        (use,) = [span for span in computed if (span.step, span.layer) == (read.step, read.layer)]
        assert use.slot == read.slot
        assert read.end_ms <= use.begin_ms
    for slot in range(plan.case.slots):
        times = sorted((span.begin_ms, span.end_ms) for span in (*every_read, *computed) if span.slot == slot)
        assert all(earlier[1] <= later[0] for earlier, later in pairwise(times))


def test_slots_and_steps_follow_from_the_turns() -> None:
    """There are three layers and two slots, filled before; the second layer is resident."""

    def noted(kind: str, layer: int, begin: int) -> StreamSpan:
        return StreamSpan(kind, layer, begin * 1_000_000, (begin + 1) * 1_000_000)

    run = [noted("wait", 0, 10), noted("compute", 0, 11), noted("read", 0, 12), noted("compute", 1, 13),
           noted("wait", 2, 14), noted("compute", 2, 15), noted("read", 2, 16), noted("wait", 0, 17),
           noted("compute", 0, 18)]  # fmt: skip
    spans_of_run = run_spans(run, blocks=(0, -1, 1), slots=2, filled=6)
    assert [(span.kind, span.layer, span.slot, span.step, span.begin_ms) for span in spans_of_run] == [
        ("wait", 0, 0, 0, 0), ("compute", 0, 0, 0, 1), ("read", 0, 0, 1, 2), ("compute", 1, None, 0, 3),
        ("wait", 2, 1, 0, 4), ("compute", 2, 1, 0, 5), ("read", 2, 1, 1, 6), ("wait", 0, 0, 1, 7),
        ("compute", 0, 0, 1, 8),
    ]  # fmt: skip


def test_the_hidden_share_is_relative_to_the_shorter() -> None:
    assert hidden_share(spans()) == pytest.approx(1.0, abs=0.01)
    alternating = [
        LayerSpan(kind=kind, layer=0, slot=0, step=step, begin_ms=begin, end_ms=begin + 5)
        for step in (1, 2)
        for kind, begin in (("read", 10.0 * step), ("wait", 10.0 * step), ("compute", 10.0 * step + 5))
    ]  # fmt: skip
    assert hidden_share(alternating) == 0
    assert hidden_share(spans(steps=1)) is None


def test_both_records_of_a_run_hide_the_same_share() -> None:
    """Includes a pause of both, and a read that is longer than the steps."""
    in_ms = [
        ("read", 0, 4),
        ("compute", 1, 3),
        ("compute", 8, 10),
        ("read", 9, 13),
        ("compute", 11, 12),
        ("read", 12, 30),
    ]
    noted = [StreamSpan(kind, 0, begin * 10**6, end * 10**6) for kind, begin, end in in_ms]
    spans = [
        LayerSpan(kind=kind, layer=0, slot=0, step=1, begin_ms=begin, end_ms=end)  # type: ignore[arg-type]
        for kind, begin, end in in_ms
    ]
    of_run = Overlapped.of(1, 10**6, 12 * 10**6, noted)
    assert (of_run.read_ms, of_run.compute_ms, of_run.busy_ms) == (6, 5, 7)
    assert of_run.hidden == hidden_share(spans) == 4 / 5


def test_nothing_is_hidden_where_nothing_was_read() -> None:
    assert Overlapped.of(1, 0, 10, [StreamSpan("compute", 0, 2, 5)]).hidden is None
    assert Overlapped.of(1, 0, 10, []).hidden is None
    assert Overlapped.of(1, 0, 10, [StreamSpan("compute", 0, 2, 5), StreamSpan("read", 0, 5, 7)]).hidden == 0


def test_the_search_ends_with_the_first_batch_that_gives_no_more() -> None:
    assert _still_grows([point(1, 100)])
    assert _still_grows([point(1, 100), point(2, 150)])
    assert not _still_grows([point(1, 100), point(2, 150), point(4, 310)])


def test_a_batch_that_does_not_fit_is_refused(folder: Path) -> None:
    plan = planned(folder)
    with pytest.raises(UserError, match="got rounds = 0, expected at least 1"):
        measured_plan(plan, batches=(1,), path=folder, rounds=0)
    with pytest.raises(UserError, match=rf"got batch {plan.largest_batch + 1:,} in .* expected at most"):
        measured_plan(plan, batches=(1, plan.largest_batch + 1), path=folder)
    with pytest.raises(UserError, match="got batch = 0, expected at least 1"):
        measured_plan(plan, batches=(0,), path=folder)


def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(folder: Path) -> None:
    (folder / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be written to the folder .*\(the parameter path\)"):
        measured_plan(planned(folder), batches=(1,), path=folder / "file")


def test_what_the_process_refuses_is_said_as_it_says_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = """print('{"error": "too little disk"}')"""
    monkeypatch.setattr(measured, "COMMAND", (sys.executable, "-c", program))
    with pytest.raises(UserError, match=r"^too little disk$"):
        measured_plan(planned(folder), batches=(1,), path=folder)


def test_a_process_that_is_killed_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    monkeypatch.setattr(measured, "COMMAND", (sys.executable, "-c", program))
    with pytest.raises(RunError, match="could not be measured: its process was killed"):
        measured_plan(planned(folder), batches=(1,), path=folder)


def test_an_interrupt_ends_the_process(folder: Path) -> None:
    plan, errors = planned(folder), []

    def run() -> None:
        try:
            measured_plan(plan, batches=(1,), path=folder)
        except KeyboardInterrupt as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while not (workers := children_that_run("labkit.harness.streaming.worker")):
        thread.join(0.01)
    interrupt(thread, KeyboardInterrupt)
    thread.join(60)
    assert errors
    assert not any(process.is_running() for process in workers)
