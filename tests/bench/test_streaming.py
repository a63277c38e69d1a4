"""The bench of streaming: its bars, what counts as hidden, and a page with the figures of the record."""

from pathlib import Path

import pytest
from helpers.models.chat_models import chat_checkpoint
from helpers.studies.comparisons import environment
from helpers.sweeps import sweep

from labkit.bench import streaming as stream_bench
from labkit.bench.streaming import checks, measure, page, resident_gb
from labkit.bench.targets import STREAM_INT4, STREAM_INT8, STREAM_WHOLE, StreamTarget
from labkit.harness import load_records
from labkit.harness.stream_record import Overlapped, StreamMeasurement, StreamRound
from labkit.kernels.layer_stream import StreamSpan
from labkit.system.whole_file import write_whole

MS = 1_000_000


def phase(steps: int = 10, wall: float = 1000.0, read: float = 950.0, compute: float = 400.0) -> Overlapped:
    return Overlapped(steps=steps, wall_ms=wall, read_ms=read, compute_ms=compute, busy_ms=wall)


def measurement(
    name: str = STREAM_WHOLE, *, wall: float = 1000.0, streamed_layers: int = 24, prompt: int = 16, reads: float = 1.0
) -> StreamMeasurement:
    """Measurement of ten steps from a disk of 1 GB/s.

    The first step finds three slots full. The disk takes 100 ms for the bytes that a step reads on average.
    """
    decode = phase(wall=wall)
    return StreamMeasurement(
        name=name,
        model="opt-1.3b",
        precision="bfloat16",
        batch=1,
        prompt_tokens=prompt,
        threads=2,
        slots=3,
        layers=24,
        streamed_layers=streamed_layers,
        file_bytes=120_000_000,
        streamed_bytes=round(100e6 / (1 - 3 / (10 * streamed_layers))),
        resident_bytes=30_000_000,
        allowed_bytes=30_000_000,
        peak_bytes=40_000_000,
        cached_bytes=0,
        reads_per_step=reads,
        direct=True,
        ready_s=1.0,
        environment=environment(),
        rounds=(StreamRound(disk_gb_s=(1.0, 1.0, 1.0), prompt=phase(1), decode=decode),) * 3,
    )


def met(*records: StreamMeasurement) -> list[bool]:
    return [check.met for check in checks(records)]


def test_a_whole_model_is_held_against_the_disk() -> None:
    assert met(measurement()) == [True, True]
    assert met(measurement(wall=1120.0)) == [False, False]
    assert measurement(wall=1250.0).disk_share().value == pytest.approx(0.8)


def test_what_is_computed_while_nothing_is_read_does_not_count_where_layers_stay() -> None:
    """Ten steps take 1,200 ms, 250 of them computing alone: 95 ms per step remain, against 100 of the disk."""
    record = measurement(wall=1200.0, streamed_layers=12)
    assert record.beside_floor() == pytest.approx(0.95)
    assert met(record) == [True]
    assert met(measurement(wall=1500.0, streamed_layers=12)) == [True]


def test_a_long_prompt_reads_every_layer_once_and_hides_the_shorter() -> None:
    assert met(measurement(prompt=2000)) == [True, True]  # 350 of 400 ms are hidden: 87 %
    assert met(measurement(prompt=2000, reads=4.0))[1] is False


def test_precisions_are_compared_step_by_step() -> None:
    records = (measurement(), measurement(STREAM_INT8, wall=500.0), measurement(STREAM_INT4, wall=300.0))
    assert [check.what for check in checks(records)][-2:] == ["bfloat16 / int8", "int8 / int4-128"]
    assert met(*records)[-2:] == [True, False]


def test_hidden_is_what_reading_and_computing_share() -> None:
    """Within 0 to 100 ms: reads 0 to 60, computes 40 to 90, so 20 of the 50 ms of computing are hidden."""
    spans = [
        StreamSpan("read", 0, -20 * MS, 30 * MS),
        StreamSpan("read", 1, 30 * MS, 60 * MS),
        StreamSpan("wait", 0, 0, 30 * MS),
        StreamSpan("compute", 0, 40 * MS, 90 * MS),
        StreamSpan("compute", 1, 100 * MS, 120 * MS),
    ]
    overlap = Overlapped.of(1, 0, 100 * MS, spans)
    assert (overlap.read_ms, overlap.compute_ms, overlap.busy_ms, overlap.wall_ms) == (60.0, 50.0, 90.0, 100.0)
    assert overlap.hidden == pytest.approx(0.4)


def test_the_record_comes_back_and_its_page_says_the_same(tmp_path: Path) -> None:
    record = measurement()
    write_whole(tmp_path / "one.jsonl", record.model_dump_json() + "\n")
    assert load_records(tmp_path) == [record]
    for part in ("0.10 of 0.12", "1.00 to 1.00", "100% [100%, 100%]", "≥ 90%: met"):
        assert part in page([record])


@sweep  # a quarter of a minute
def test_a_small_model_is_measured_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_bench, "SLOTS", 2)
    model = str(chat_checkpoint(tmp_path / "model", layers=8))
    target = StreamTarget("half", "float32", resident=0.5)
    (half,) = measure(model, (target,), tmp_path / "packed", 1, 2, 3, environment())
    assert (half.layers, half.slots) == (8, 2)
    assert 3 <= half.streamed_layers <= 4  # the estimate takes layers before packing, which are a little larger
    assert half.resident_bytes <= resident_gb(model, target) * 1e9
    assert half.reads_per_step == pytest.approx(1.0, abs=0.3)
    assert len(half.rounds) == 2
