"""The bench of the regions: its bars, and a page made from the records."""

from pathlib import Path

import pytest

from labkit.bench import regions as region_bench
from labkit.bench.regions import checks
from labkit.bench.targets import REGION_RATIOS, REGION_TARGETS, RegionTarget
from labkit.harness import load_records
from labkit.harness.regions.measure import measure_regions
from labkit.harness.regions.records import RegionMeasurement
from labkit.harness.regions.sides import ONE_CALL, UNFUSED
from labkit.harness.regions.vocabulary import REGIONS
from labkit.models.presets import PRESETS
from labkit.stages import Stage


@pytest.fixture(scope="module")
def row() -> RegionMeasurement:
    (measurement,) = measure_regions("tiny-gpt2", regions=["qkv"], context=9, threads=1, rounds=2, layers=2)
    return measurement


def with_known_times(row: RegionMeasurement, *, unfused_us: float, bandwidth_gb_s: float = 10.0) -> RegionMeasurement:
    """The row with a one-call step of 10 µs that needs 80,000 bytes."""
    rounds = row.rounds_us | {UNFUSED: (unfused_us,) * 2, ONE_CALL: (10.0,) * 2}
    known = {"rounds_us": rounds, "epochs": (0, 1), "bytes": 80_000, "bandwidth_gb_s": (bandwidth_gb_s,) * 2}
    return row.model_copy(update=known)


def test_a_ratio_on_its_bar_is_met_and_one_below_it_missed(row: RegionMeasurement) -> None:
    bar = REGION_RATIOS[Stage.QKV]
    assert next(checks(with_known_times(row, unfused_us=10 * bar))).met
    assert not next(checks(with_known_times(row, unfused_us=9.99 * bar))).met


def test_a_missed_bar_that_the_memory_does_not_allow_says_what_it_would(row: RegionMeasurement) -> None:
    ratio, share = checks(with_known_times(row, unfused_us=16.0))
    assert "at the limit it would be 2.00x" in str(ratio)
    assert share.met
    assert "at the limit" not in str(next(checks(with_known_times(row, unfused_us=24.0))))


def test_only_float32_is_judged(row: RegionMeasurement) -> None:
    bfloat16 = row.model_copy(update={"case": row.case.model_copy(update={"dtype": "bfloat16"})})
    assert list(checks(bfloat16)) == []


def test_every_case_is_a_preset() -> None:
    assert {target.model for target in REGION_TARGETS} <= PRESETS.keys()


def test_a_bench_writes_records_and_a_page_made_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = (RegionTarget("tiny-gpt2", "float32", 9),)
    monkeypatch.setattr(region_bench, "REGION_TARGETS", targets)
    region_bench.main(quick=True, output=tmp_path, threads=1)
    (records,), (page,) = tmp_path.glob("*-quick-regions.jsonl"), tmp_path.glob("*-quick-regions.md")
    rows = [record for record in load_records(records) if isinstance(record, RegionMeasurement)]
    assert [row.region for row in rows] == [*REGIONS]
    text = page.read_text()
    assert text == region_bench.page(rows)
    assert "## tiny-gpt2 float32, 9" in text
