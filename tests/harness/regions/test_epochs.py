"""Records of layers in epochs: the interval comes from the epochs, and old records keep the ratio of their rounds."""

import io
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from helpers.studies.comparisons import environment
from helpers.studies.drawn import subtitle
from rich.console import Console

from labkit.figures.regions import ladder_figure, regions_figure, regions_table
from labkit.harness.diff.timed import timed_sides
from labkit.harness.regions.records import LadderMeasurement, LayerCase, RegionMeasurement
from labkit.harness.regions.sides import FUSED, ONE_CALL, UNFUSED
from labkit.harness.regions.table import region_table
from labkit.statistics import ratio
from labkit.statistics.sequential import EPOCHS, EPOCHS_IN_PLACE, centre, sequential_ratio
from labkit.studies import kernels as study_module
from labkit.studies.kernels import KernelStudy, study_kernels
from labkit.system.partly import NotMeasuredError

CASE = LayerCase(impl="cpp", model="gpt2", dtype="float32", batch=1, context=128, threads=2, layers=12)
ROUNDS = 8  # of an epoch


def record(
    placements: list[float], *, kind: type = RegionMeasurement, rate_matters: bool = False, **changes: Any
) -> Any:
    """Epochs in which the unfused side takes 30 µs times a factor of its own, and the fused sides 10 µs. In every
    second round the memory is half as fast; if `rate_matters`, the fused sides then take twice the time.
    """
    random, rounds = np.random.default_rng(0), ROUNDS * len(placements)
    slow = np.arange(rounds) % 2 == 1
    fused = np.where(slow & rate_matters, 20.0, 10.0)
    unfused = 30 * np.repeat(placements, ROUNDS) * np.exp(0.002 * random.standard_normal(rounds))
    of_region = {"region": "qkv", "ops": ("addmm",), "unfused_bytes": 10**6, "flops": 10**6, "warm_us": {}}
    fields: dict[str, Any] = {
        "created": datetime(2026, 1, 1, tzinfo=UTC),
        "case": CASE,
        "environment": environment(),
        "bytes": 200_000,
        "rounds_us": {UNFUSED: unfused.tolist(), FUSED: fused.tolist(), ONE_CALL: fused.tolist()},
        "bandwidth_gb_s": np.where(slow, 20.0, 40.0).tolist(),
        "others_cores": [0.0] * len(placements),
        "epochs": np.repeat(range(len(placements)), ROUNDS).tolist(),
        "looks": (len(placements),),
        "placed_anew": True,
    }
    return kind(**fields | (of_region if kind is RegionMeasurement else {}) | changes)


def text_of(row: RegionMeasurement) -> str:
    console = Console(width=400, file=io.StringIO())
    console.print(region_table([row]))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_the_interval_comes_from_the_spread_between_epochs() -> None:
    """24 rounds agree within 0.2 % in each epoch, and three epochs differ by some percent."""
    row = record([1.0, 1.04, 0.97])
    centres = [centre(logs) for logs in row.pair_logs(UNFUSED, ONE_CALL)]
    assert row.gain == row.ratio(UNFUSED, ONE_CALL) == sequential_ratio(centres, 1, EPOCHS)
    assert row.gain.high / row.gain.low > 1.1
    assert (row.unit, row.count, row.verdict) == ("epoch", 3, "FASTER")
    assert row.scatter.placements == pytest.approx(np.std(centres, ddof=1))
    assert row.scatter.turns < 0.002


def test_an_epoch_is_one_sample_of_a_side() -> None:
    row = record([1.0, 2.0])
    assert row.samples_us(UNFUSED) == pytest.approx((30, 60), rel=0.01)
    for side in timed_sides(row):
        assert (len(side.rounds), side.sample, side.placed_anew) == (2, "epoch", True)
        assert [len(epoch.times) for epoch in side.epochs] == [ROUNDS] * 2
        assert side.epochs[0].rates_gb_s == (40.0, 20.0) * (ROUNDS // 2)


def test_two_epochs_are_too_few() -> None:
    trust = record([1.0, 1.0]).trust
    assert "2 epochs, fewer than 3" in trust.why


def test_a_side_is_the_same_as_itself_within_3_percent() -> None:
    places = [1.001, 0.999, 1.0, 1.002, 0.998]
    assert record([place / 3 for place in places]).verdict == "SAME"
    assert record([place / 2.9 for place in places]).verdict == "FASTER"


def test_weights_that_stay_in_place_need_a_larger_difference() -> None:
    places = [1.0195 / 3] * 80
    moved, stayed = record(places), record(places, placed_anew=False)
    assert (moved.rule, stayed.rule) == (EPOCHS, EPOCHS_IN_PLACE)
    assert (moved.verdict, stayed.verdict) == ("FASTER", "SAME")
    assert "in new memory in each" in text_of(moved)
    assert "in one place all the time" in text_of(stayed)


def test_a_record_without_epochs_keeps_its_ratio() -> None:
    new = record([1.0, 1.1, 0.9])
    old = RegionMeasurement.model_validate(
        new.model_dump(exclude={"epochs", "looks", "placed_anew", "interrupted"}, mode="json")
    )
    assert old.gain == ratio(old.rounds_us[UNFUSED], old.rounds_us[ONE_CALL])
    assert (old.unit, old.count, old.confidence) == ("round", 24, "95%")
    assert old.scatter is None
    assert old.by_rate is None
    assert old.samples_us(UNFUSED) == old.rounds_us[UNFUSED]
    assert "scatter" not in text_of(old)
    assert "24 rounds" in text_of(old)


def test_table_and_json_show_both_spreads_the_verdict_and_what_is_left_to_decide() -> None:
    row = record([0.98, 1.02, 1.0, 1.03])
    text, figures = text_of(row), row.as_dict()
    assert "95% over 1 look]" in text
    assert "4 epochs of about 8 rounds" in text
    assert f"± {row.scatter.placements:.1%}" in text
    assert f"± {row.scatter.turns:.1%}" in text
    assert figures["verdict"] == "FASTER"
    assert figures["scatter"] == {"placements": row.scatter.placements, "turns": row.scatter.turns}
    assert figures["looks"] == [4]
    undecided = record([0.98 / 3, 1.02 / 3, 1.0 / 3, 1.03 / 3])
    assert undecided.verdict == "UNDECIDED"
    assert "qkv: undecided after 4 epochs: about" in text_of(undecided)
    assert "interrupted" in text_of(record([1.0] * 3, interrupted=True))


def test_a_gain_that_follows_the_rate_of_the_memory_says_so() -> None:
    assert record([1.0] * 5).by_rate is None
    row = record([1.0] * 5, rate_matters=True)
    assert str(row.by_rate) == "1.50x at 20 GB/s, 3.00x at 40 GB/s"
    assert "qkv: the ratio follows the rate of the memory: 1.50x at 20 GB/s, 3.00x at 40 GB/s" in text_of(row)
    assert row.as_dict()["by_rate"]["fast_ratio"] == pytest.approx(3, rel=0.01)


def study() -> KernelStudy:
    rows = tuple(record([1.0, 1.02, 0.99]).model_copy(update={"region": name}) for name in ("qkv", "mlp"))
    return KernelStudy(rows, record([1.0, 1.02, 0.99], kind=LadderMeasurement), (), 100.0)


def test_figures_show_epochs_and_scatter() -> None:
    result = study()
    assert "3 epochs of about 8 rounds" in subtitle(regions_figure(result)).replace("<br>", " ")
    assert "between placements ±" in subtitle(ladder_figure(result)).replace("<br>", " ")
    table = regions_table(result)
    assert set(table.loc["verdict"]) == {"FASTER"}
    assert all("inside of an epoch" in cell for cell in table.loc["scatter of the gain"])
    assert set(result.to_frame()["epochs"]) == {3}


def test_a_run_that_was_stopped_before_the_ladder_shows_its_regions() -> None:
    result = replace(study(), ladder=None)
    assert "qkv 3.0" in result.headline
    assert "mlp 3.0" in result.outcome.claim
    assert set(result.to_frame()["region"]) == {"qkv", "mlp"}
    regions_figure(result)
    with pytest.raises(NotMeasuredError, match="stopped before the whole layer"):
        ladder_figure(result)


@pytest.mark.parametrize("stopped_in", ["regions", "ladder"])
def test_an_interrupt_of_the_study_keeps_the_regions(monkeypatch: pytest.MonkeyPatch, stopped_in: str) -> None:
    rows = (record([1.0] * 3, interrupted=stopped_in == "regions"),)

    def ladder(bench: object, **_: object) -> None:
        assert stopped_in == "ladder"
        raise KeyboardInterrupt

    monkeypatch.setattr(study_module.LayerBench, "regions", lambda bench, **_: rows)
    monkeypatch.setattr(study_module.LayerBench, "ladder", ladder)
    result = study_kernels(model="tiny-gpt2", context=9, threads=1)
    assert (result.regions, result.ladder) == (rows, None)
    assert result.timeline
