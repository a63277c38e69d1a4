"""Plans checked by hand: the roofline of streaming, the trade of resident layers for sequences, and what fits."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.studies.streaming_plans import DISK, LAYER, LAYERS, NUMBERS, PEAK, plan, point

from labkit.harness import load_records, save
from labkit.harness.streaming import make
from labkit.harness.streaming.make import bytes_per_weight, plan_streaming
from labkit.harness.streaming.table import measured_table, predicted_table, trade_table
from labkit.system.errors import UserError
from labkit.weights.precision import precision_of
from labkit.weights.quantise import Quantization
from labkit.weights.resolve import resolve
from labkit.weights.spec import WeightSpec

RATES: dict[str, Any] = {"disk_gb_s": 1.0, "gflop_s": 100.0}


def test_a_step_takes_the_longer_of_reading_and_computing() -> None:
    planned = plan()
    for batch in (1, 7, 60):
        step = planned.step(batch)
        assert step.disk_ms == pytest.approx((LAYERS - step.resident_layers) * LAYER / DISK / 1e6)
        assert step.compute_ms == pytest.approx(batch * 2 * NUMBERS * LAYERS / PEAK / 1e6)
        assert step.step_ms == max(step.disk_ms, step.compute_ms)
        assert step.tokens_per_s == pytest.approx(batch / step.step_ms * 1e3)


def test_computing_takes_as_long_as_the_disk_from_r_star_rows_on() -> None:
    """r* = F s / (2 D) for layers that are all streamed; with some in memory the disk has less to do."""
    streamed = plan(memory_gb=1e3)
    assert streamed.free_rows == pytest.approx(PEAK * 2 / (2 * DISK))
    below, above = (streamed.step(round(streamed.free_rows * share), 0) for share in (0.99, 1.01))
    assert (below.bound_by, above.bound_by) == ("disk", "compute")
    assert streamed.free_batch is None  # everything fits in a thousand GB
    for memory_gb in (1.0, 1.5, 2.2):
        planned = plan(memory_gb=memory_gb)
        free = planned.free_batch
        assert free is not None
        assert (planned.step(free - 1).bound_by, planned.step(free).bound_by) == ("disk", "compute")
        assert free <= planned.free_rows + 1
    fewer, more = (plan(memory_gb=memory_gb).free_batch for memory_gb in (2.2, 1.0))
    assert fewer is not None
    assert more is not None
    assert fewer <= more


def test_reading_the_memory_bounds_what_is_computed_from_there() -> None:
    slow = plan(memory_gb=1e3, memory_gb_s=10.0).step(1)
    assert slow.streamed_bytes == 0
    assert slow.step_ms == pytest.approx((LAYERS * LAYER + 2e8) / 10e6, rel=0.01)


@pytest.mark.parametrize("memory_gb", [0.7, 1.0, 1.5, 2.2, 2.6])
def test_what_fits_is_within_the_budget_and_one_sequence_more_is_not(memory_gb: float) -> None:
    planned = plan(memory_gb=memory_gb)
    assert planned.trade
    for step in planned.trade:
        assert step.memory_bytes <= planned.memory < planned.step(step.batch + 1, step.resident_layers).memory_bytes
    assert planned.largest_batch == planned.trade[0].batch == planned.batches[-1]
    for batch in planned.batches:
        resident = planned.residents(batch)
        assert planned.step(batch).memory_bytes <= planned.memory
        larger = [count for count in planned.possible_residents if count > resident]
        assert not larger or planned.step(batch, larger[0]).memory_bytes > planned.memory


def test_memory_goes_to_layers_for_latency_and_to_sequences_for_throughput() -> None:
    planned = plan(memory_gb=1.6)
    batches = [step.batch for step in planned.trade]
    assert batches == sorted(batches, reverse=True)
    times_ms = [planned.step(1, resident).step_ms for resident in range(5)]
    assert times_ms == sorted(times_ms, reverse=True)
    assert planned.lowest_latency.resident_layers == planned.trade[-1].resident_layers
    assert planned.highest_throughput.resident_layers == 0
    every = [
        planned.step(batch, traded.resident_layers).tokens_per_s
        for traded in planned.trade
        for batch in range(1, traded.batch + 1)
    ]
    assert planned.highest_throughput.tokens_per_s == pytest.approx(max(every))


def test_the_smallest_of_equally_fast_batches_is_best() -> None:
    planned = plan(memory_gb=2.2, gflop_s=1.0)  # the processor is so slow that one sequence hides the disk
    assert planned.highest_throughput.batch == 1


def test_a_prompt_reads_each_layer_once_however_long_it_is() -> None:
    planned = plan()
    assert planned.first_token_ms(1) == planned.step(1).disk_ms
    many = planned.largest_batch
    assert plan(gflop_s=1.0).first_token_ms(many) == pytest.approx(many * 32 * NUMBERS * LAYERS / 1e6)


def test_a_measured_step_is_compared_with_the_rates_of_its_run() -> None:
    """If the disk was twice as fast meanwhile, the same time is half as good."""
    usual, fast = point(4, 1500.0), point(4, 1500.0, disk=2 * DISK)
    planned = plan(points=(usual, fast))
    assert planned.predicted(usual).step_ms == pytest.approx(1500)
    assert planned.predicted(fast).step_ms == pytest.approx(750)
    assert usual.share_of_disk == pytest.approx(1.0)
    assert (planned.share_of_most(usual), planned.share_of_most(fast)) == pytest.approx((1.0, 0.5))
    assert point(4, 10.0, resident=LAYERS, streamed_bytes=0).share_of_disk is None


def test_tables_tell_predicted_from_measured_and_say_what_went_over() -> None:
    heavy = point(8, peak_bytes=1_600_000_000)
    planned = plan(points=(point(1), heavy))
    assert "predicted" in predicted_table(planned).title
    assert "predicted" in trade_table(planned).title
    assert "predicted" not in str(measured_table(planned))
    measured = measured_table(planned)
    assert [row[0] for row in measured.rows] == ["1", "8"]
    assert "batch 8 took 1.600 GB, more than it was given" in " ".join(measured.notes)
    assert [row[0] for row in predicted_table(planned).rows] == [str(batch) for batch in planned.batches]
    marks = {row[-1] for row in trade_table(planned).rows}
    assert marks == {"", "quickest step", "most tokens/s"}
    frame = planned.to_frame()
    assert frame["figures"].value_counts()["measured"] == 2
    assert set(frame["figures"]) == {"predicted", "trade", "measured"}
    assert set(frame["dtype"]) == {planned.case.precision}
    assert {"machine", "model", "dtype", "batch", "prompt_tokens"} <= set(frame.columns)


def test_steps_that_outrun_the_probe_are_doubted() -> None:
    assert "the disk was not steady" in measured_table(plan(points=(point(4, 700.0),))).notes[-1]


def test_a_plan_is_read_back_as_it_was_saved(tmp_path: Path) -> None:
    planned = plan(points=(point(1),))
    save(planned, tmp_path)
    assert load_records(tmp_path) == [planned]


@pytest.mark.parametrize(
    ("name", "bits"),
    [("float32", 32), ("bfloat16", 16), ("int8-32", 8.5), ("int4-32", 5), ("int4-64-symmetric", 4.25), ("int8", 8.24)],
)
def test_a_weight_takes_its_bits_and_its_share_of_the_scales(name: str, bits: float) -> None:
    precision = precision_of(name)
    quant = Quantization.model_validate(precision.quant or {})
    spec = WeightSpec.of(resolve("tiny-gpt2").hf_config, precision.dtype or torch.float32, quant=quant)
    assert 8 * bytes_per_weight(spec) == pytest.approx(bits, abs=0.1)


def test_another_machine_is_planned_without_probing_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make, "folder_rate_gb_s", lambda folder: pytest.fail("probed"))
    monkeypatch.setattr(make, "probe_bandwidth", lambda *args: pytest.fail("probed"))
    planned = plan_streaming("llama-2-70b", memory_gb=16, precision="int4-64", prompt=512, new=32, **RATES)
    assert planned.rates.memory_gb_s is None
    assert planned.footprint.weights > 2 * planned.memory
    assert planned.step(1).bound_by == "disk"


def test_this_machine_is_probed(tmp_path: Path) -> None:
    planned = plan_streaming("tiny-llama", memory_gb=0.2, path=tmp_path / "new", prompt=4, new=2, threads=1)
    assert planned.rates.disk_gb_s > 0
    assert planned.rates.gflop_s > 0
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("tiny-lama", {}, "unknown model 'tiny-lama'"),
        ("tiny-llama", {"precision": "int5"}, "unknown precision 'int5'"),
        ("tiny-llama", {"precision": "stored"}, "whose bytes only its file knows"),
        ("tiny-llama", {"precision": "int4-128"}, "does not divide the 64 inputs"),
        ("tiny-llama", {"memory_gb": 0.01}, "the least that works with 3 slots is"),
        ("tiny-llama", {"memory_gb": -1.0}, "got memory_gb = -1, expected more than 0"),
        ("tiny-llama", {"disk_gb_s": 0.0}, "got disk_gb_s = 0, expected more than 0"),
        ("tiny-llama", {"slots": 1}, "got slots = 1, expected at least 2"),
        ("tiny-llama", {"new": 1}, "got new = 1, expected at least 2"),
        ("tiny-llama", {"prompt": 3000}, "use a shorter prompt"),
    ],
)
def test_what_cannot_be_planned_is_refused(model: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan_streaming(model, **({"memory_gb": 1.0} | RATES | options))


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"streamed weights cannot be written to the folder .*\(the parameter path\)"):
        plan_streaming("tiny-llama", memory_gb=1.0, path=tmp_path / "file")


def test_layers_fewer_than_slots_are_all_in_memory_or_none() -> None:
    few = plan(memory_gb=1e3)
    few = few.model_copy(update={"footprint": replace(few.footprint, layers=2)})
    assert few.possible_residents == (0, 2)
    assert few.step(1).streamed_bytes == 0
