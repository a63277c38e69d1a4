"""Speedups of fused regions and layers carry their grade in the table, the figures, --json and the headline."""

import io
from datetime import UTC, datetime
from typing import Any

import pytest
from helpers.studies.comparisons import environment
from helpers.studies.drawn import subtitle
from rich.console import Console

from labkit.figures.regions import ladder_figure, regions_figure
from labkit.harness.regions.records import LadderMeasurement, LayerCase, RegionMeasurement
from labkit.harness.regions.sides import FUSED, ONE_CALL, UNFUSED
from labkit.harness.regions.table import region_table
from labkit.studies.kernels import KernelStudy

CASE = LayerCase(impl="cpp", model="gpt2", dtype="float32", batch=1, context=128, threads=2, layers=12)
STEADY = (1.0, 1.01, 1.02, 1.01, 1.0, 1.02, 1.01)
WILD = (1.0, 5.0, 0.2, 30.0, 1.0, 0.1, 9.0)


def record(kind: type, rounds: tuple[float, ...], **more: Any) -> Any:
    times = {UNFUSED: 300.0, FUSED: 110.0, ONE_CALL: 100.0}
    conditions = {"bandwidth_gb_s": (20.0,) * len(rounds), "others_cores": (0.0,) * len(rounds)} | more
    return kind(
        created=datetime(2025, 1, 1, tzinfo=UTC),
        case=CASE,
        environment=environment(),
        bytes=1_800_000,  # at 20 GB/s: 90 of the 100 microseconds
        rounds_us={
            side: tuple(time_us * (factor if side == UNFUSED else 1.0) for factor in rounds)
            for side, time_us in times.items()
        },
        **conditions,
    )


def study(rounds: tuple[float, ...], **more: Any) -> KernelStudy:
    region = {"region": "qkv", "ops": ("addmm",), "unfused_bytes": 2_000_000, "flops": 1_000_000, "warm_us": {}}
    rows = (record(RegionMeasurement, rounds, **region, **more),)
    return KernelStudy(rows, record(LadderMeasurement, rounds, **more), (), 100.0)


def texts_of(result: KernelStudy) -> list[str]:
    console = Console(width=400, file=io.StringIO())
    console.print(region_table(result.regions))
    drawn = [regions_figure(result), ladder_figure(result)]
    return [
        console.file.getvalue(),  # type: ignore[attr-defined]
        result.headline,
        *(subtitle(figure) for figure in drawn),
    ]


def test_quiet_rounds_are_trusted() -> None:
    result = study(STEADY)
    assert result.regions[0].as_dict()["trustworthy"] is True
    assert "3.03x" in result.headline
    assert not any("trustworthy" in text for text in texts_of(result))


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (study(WILD), "is wide"),
        (study(STEADY[:3]), "3 rounds, fewer than 6"),
        (study(STEADY, others_cores=(1.2,) * 7), "other programs used 1.2 of the processors"),
        (study(STEADY, bandwidth_gb_s=(2.0,) * 7), "at 900% of a limit that nothing can pass"),
    ],
    ids=["scattered", "three rounds", "busy", "past the limit"],
)
def test_noise_is_never_sold_as_a_result(result: KernelStudy, reason: str) -> None:
    row = result.regions[0].as_dict()
    assert row["trustworthy"] is False
    assert reason in "; ".join(row["distrust"])
    table, headline, *subtitles = texts_of(result)
    for text in (table, headline):
        assert "not trustworthy: " in text
        assert reason in text.replace("<br>", " ")
    assert all("not trustworthy, for the reasons" in text.replace("<br>", " ") for text in subtitles)


def test_a_region_from_before_grades_is_read() -> None:
    row = study(STEADY).regions[0]
    old = row.model_dump(exclude={"others_cores"})
    assert RegionMeasurement.model_validate(old).trust.trustworthy
