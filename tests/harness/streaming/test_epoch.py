"""An epoch of a streamed engine: turns of some steps, each judged by the probes next to it. The engine is made up."""

import json
from collections.abc import Callable, Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.studies.streaming_plans import DISK, LAYER, LAYERS, PEAK, plan, point

from labkit.harness.streaming import epoch as module
from labkit.harness.streaming.epoch import FEWEST_TURNS, MeasuredEpoch, Rates, measure_epoch
from labkit.harness.streaming.records import BatchPoint, StreamEpoch, StreamTurn
from labkit.harness.streaming.table import measured_table
from labkit.harness.turns import looks, turn_streamer

FIRST_MS, STEP_MS, AFTER_PAUSE_MS = 50, 20, 5  # after a pause the slots are full, so a step takes less time


class Clock:
    """A clock that only the made-up engine moves, in milliseconds."""

    def __init__(self) -> None:
        self.now_ms = 0

    def perf_counter_ns(self) -> int:
        return self.now_ms * 10**6

    def monotonic(self) -> float:
        return self.now_ms / 1e3


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made_up = Clock()
    monkeypatch.setattr(turn_streamer, "perf_counter_ns", made_up.perf_counter_ns)
    for clocked in (module, looks):
        monkeypatch.setattr(clocked, "monotonic", made_up.monotonic)
    monkeypatch.setattr(looks, "TURN_MS", 45)
    for name, value in (("EPOCH_S", 2.0), ("MOST_PAIRS", 16)):
        monkeypatch.setattr(looks, name, value)
    return made_up


def measured(clock: Clock, new_tokens: int, rates: Iterator[float], probe_ms: int = 100) -> MeasuredEpoch:
    """An epoch of an engine whose steps have known times; `rates` of the disk, by probe."""
    paused = False

    def probe() -> Rates:
        nonlocal paused
        paused = True
        clock.now_ms += probe_ms
        return Rates(next(rates), PEAK)

    def generate(streamer: Any) -> None:
        nonlocal paused
        streamer.put(torch.zeros(1, 4))
        for token in range(new_tokens):
            took = FIRST_MS if token == 0 else AFTER_PAUSE_MS if paused else STEP_MS
            clock.now_ms += took
            paused = False
            streamer.put(torch.tensor([token]))
        streamer.end()

    return measure_epoch(generate, None, new_tokens, probe)


def test_each_turn_has_the_mean_of_the_probes_next_to_it_and_no_time_of_a_pause(clock: Clock) -> None:
    record = measured(clock, 32, (float(number) for number in count(1))).record
    assert [turn.disk_gb_s for turn in record.turns] == [number + 1.5 for number in range(len(record.turns))]
    assert {turn.gflop_s for turn in record.turns} == {PEAK}
    assert set(record.prompts_ms) == {FIRST_MS}
    assert {turn.step_ms for turn in record.turns} == {STEP_MS}
    assert AFTER_PAUSE_MS in {turn.first_step_ms for turn in record.turns}
    assert record.step_ms == STEP_MS
    assert 1.8 < record.turns[-1].at_s < 2.5  # an epoch ends after two seconds


@pytest.mark.parametrize(("new_tokens", "counted"), [(2, [1, 1]), (3, [1, 1]), (4, [2, 2]), (8, [2, 3]), (9, [2, 4])])
def test_short_generations_are_repeated_until_there_are_enough_turns(
    clock: Clock, new_tokens: int, counted: list[int]
) -> None:
    epoch = measured(clock, new_tokens, iter([DISK] * 99), probe_ms=2500)
    assert len(epoch.record.turns) == len(counted) == FEWEST_TURNS
    assert len(epoch.decode_ms) == sum(counted)
    assert len(epoch.record.prompts_ms) == (1 if new_tokens > 6 else 2)


def test_the_stream_is_recorded_up_to_the_first_pause(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drawn steps follow the prompt without a pause, and the reader rests while the disk is probed."""
    calls: list[str] = []
    noted = iter([("prompt and first turn",), ("later",), ("later",)])

    class Stream:
        slots, blocks_read = 2, 7

        def rest(self) -> None:
            calls.append("rest")

        def take_spans(self) -> Any:
            return next(noted)

    monkeypatch.setattr(module, "LayerStream", Stream)
    monkeypatch.setattr(module, "slots_filled", lambda streamed: 7)
    streamed: Any = SimpleNamespace(stream=Stream())

    def generate(streamer: Any) -> None:
        for token in range(8):
            clock.now_ms += STEP_MS
            streamer.put(torch.tensor([token]))

    def probe() -> Rates:
        calls.append("probe")
        clock.now_ms += 2500
        return Rates(DISK, PEAK)

    epoch = measure_epoch(generate, streamed, 8, probe)
    assert (epoch.spans, epoch.filled) == (("prompt and first turn",), 7)
    assert calls == ["probe", "rest", "probe", "rest", "probe"]


def in_epochs(step_ms: Callable[[int], float], epochs: int = 3, **more: Any) -> BatchPoint:
    """A batch whose disk is twice as fast in every second turn, and its steps as well. `step_ms`: by epoch."""
    records = [
        StreamEpoch(
            prompts_ms=(3000.0,),
            turns=tuple(
                StreamTurn(at_s=turn, first_step_ms=9.0, step_ms=step_ms(epoch) / speed, disk_gb_s=speed * DISK,
                           gflop_s=PEAK)
                for turn, speed in enumerate((1, 2, 1))
            ),
        )
        for epoch in range(epochs)
    ]  # fmt: skip
    return point(4, **{"epochs": tuple(records), "runs_ms": (), "decode_ms": (1500.0, 750.0)} | more)


def test_the_share_of_the_disk_is_paired_with_the_rate_next_to_each_turn() -> None:
    """A disk that changes its rate does not change the share of it."""
    batch = in_epochs(lambda epoch: 1500.0)
    assert batch.streamed_bytes == (LAYERS - 5) * LAYER
    assert batch.share_of_disk == pytest.approx(1.0)
    planned = plan(points=(batch,))
    assert planned.share_of_most(batch) == pytest.approx(1.0)
    assert (batch.disk, batch.processor) == (DISK, PEAK)


def test_the_interval_of_a_batch_comes_from_the_scatter_between_epochs() -> None:
    batch = in_epochs(lambda epoch: 1500.0 * (1 + 0.02 * epoch))
    assert batch.step_ms == pytest.approx(1530, rel=1e-3)
    assert batch.interval.low < 1 / 1.02
    assert batch.interval.high > 1.02
    assert batch.trust(threads=2, cores=2).trustworthy
    two = in_epochs(lambda epoch: 1500.0 + epoch, epochs=2).trust(threads=2, cores=2)
    assert "2 epochs, fewer than 3" in two.why
    wide = in_epochs(lambda epoch: 1500.0 * (1 + epoch)).trust(threads=2, cores=2)
    assert "is wide" in wide.why


def test_the_table_shows_the_interval_and_says_how_it_came_about() -> None:
    table = measured_table(plan(points=(in_epochs(lambda epoch: 1500.0 + 10 * epoch),)))
    (row,) = table.rows
    assert row[3].startswith("1,510 [1,4")
    assert any(note.startswith("3 epochs, each with a new engine") for note in table.notes)
    older = measured_table(plan(points=(point(4, runs_ms=()),)))
    assert older.rows[0][3] == "1,500"
    assert not any("epoch" in note for note in older.notes)


def test_older_records_are_read() -> None:
    older = json.loads(point(4).model_dump_json())
    del older["epochs"]
    assert BatchPoint.model_validate(older) == point(4)
