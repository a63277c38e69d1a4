"""The regions of a layer as a table for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from labkit.harness.regions.records import RegionMeasurement
from labkit.harness.regions.sides import FUSED, ONE_CALL, TITLES, UNFUSED
from labkit.stages import Stage


def region_table(rows: Sequence[RegionMeasurement]) -> RenderableType:
    """A column per region: the times of all sides, the gain of fusing with its interval, and the share of the limit."""
    case = rows[0].case
    table = Table(
        title=f"{case.model}, {case.dtype}, batch {case.batch}, {case.context} tokens in the cache: one layer, µs",
        title_justify="left",
    )
    table.add_column("median of rounds")
    for row in rows:
        table.add_column(row.region, justify="right")

    def add(title: str, cell: Callable[[RegionMeasurement], str]) -> None:
        table.add_row(title, *map(cell, rows))

    def median(side: str) -> Callable[[RegionMeasurement], str]:
        return lambda row: _us(row.median_us(side))

    def ratio(candidate: str, baseline: str = UNFUSED) -> Callable[[RegionMeasurement], str]:
        return lambda row: str(row.ratio(baseline, candidate)).replace(" [", "\n[")

    add("torch ops of the unfused", lambda row: str(len(row.ops)))
    for side in TITLES:
        if any(side in row.rounds_us for row in rows):
            add(TITLES[side], median(side))
    confidence = rows[0].confidence
    add(f"unfused / fused\n[{confidence}]", ratio(FUSED))
    unfused, fused = rows[0].in_engine
    inside = "one-call step" if fused == ONE_CALL else "both in a graph"
    if fused in rows[0].rounds_us:
        add(f"unfused / {inside}\n[{confidence}]", ratio(fused, unfused))
    add("verdict", lambda row: str(row.verdict))
    if rows[0].epochs:
        add("scatter between placements", lambda row: _scatter(row, "placements"))
        add("scatter inside of an epoch", lambda row: _scatter(row, "turns"))
    add("published", lambda row: f"{row.published[0]:.1f}x" if row.published else "-")
    add("MB that must be read", lambda row: "-" if row.region == Stage.RESIDUAL else f"{row.bytes / 1e6:.3g}")
    add("of the limit, unfused", lambda row: _share(row.floor_share(unfused)))
    add(f"of the limit, {inside}", lambda row: _share(row.floor_share(fused)))
    add("unfused, layer in the cache", lambda row: _us(row.median_us(UNFUSED, warm=True)))
    add("fused, layer in the cache", lambda row: _us(row.median_us(FUSED, warm=True)))
    return Group(table, Text("\n".join(_notes(rows)), style="dim"))


def _notes(rows: Sequence[RegionMeasurement]) -> list[str]:
    first = rows[0]
    notes = []
    if first.case.dtype == "int8":
        notes.append("the unfused side is bfloat16: plain torch ops have no int8 weights")
    if first.case.impl == "triton" and first.environment.gpu is None:
        notes.append("interpreted on the CPU: this tests whether the kernels are right, not how fast they are")
    limit = ""
    if first.read_bandwidth_gb_s is not None:
        limit = f"; {first.read_bandwidth_gb_s:.0f} GB/s read, probed in the rounds"
    notes.append(f"machine: {first.environment.machine}; {first.case.layers} layers, {first.measured_line}{limit}")
    notes += [f"{row.region}: {remark}" for row in rows for remark in row.remarks]
    notes += [f"{row.region}: the ratio follows the rate of the memory: {row.by_rate}" for row in rows if row.by_rate]
    if source := next((row.published[1] for row in rows if row.published), None):
        notes.append(f"published, not measured here: {source}; it does not state GPU, model and batch")
    return notes


def _scatter(row: RegionMeasurement, name: str) -> str:
    return "-" if row.scatter is None else f"± {getattr(row.scatter, name):.1%}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _us(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"
