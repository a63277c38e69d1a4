"""Measured and published figures, in two panels with an axis each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from labkit.figures.room import RATIO, folded, left_of
from labkit.figures.summary import METRICS, stages_subtitle, subtitle_of
from labkit.figures.theme import (
    PUBLISHED,
    PUBLISHED_PAPER,
    SIDE_COLORS,
    STAGE_COLORS,
    finish,
    heading,
    in_lines,
    whiskers,
    write_after,
)
from labkit.published import NOT_MEASURED_HERE, published, published_speedups
from labkit.stages import FUSED_REGIONS
from labkit.studies.frames import number, stage_frame

if TYPE_CHECKING:
    import pandas as pd

    from labkit.harness import Comparison
    from labkit.statistics import Ratio

MEASURED_HERE = "measured here"
OWN_SCALES = "each panel has a scale of its own"
UNFUSED = ", against unfused cuBLAS kernels; model and hardware not stated"
LABEL = 190  # pixels of a bar's name
REGION_NAMES = dict(zip(FUSED_REGIONS, ("1 QKV", "2 attention", "3 MLP", "4 bias + residual"), strict=True))


def published_figure(comparison: Comparison) -> go.Figure:
    """Our speedups with their intervals above; below, the speedups that follow from published latencies."""
    ratios = {name: comparison.ratio(metric) for metric, name in METRICS.items()}
    figure = make_subplots(rows=2, cols=1, row_heights=[0.3, 0.7], vertical_spacing=0.17)
    add_measured(figure, list(ratios), list(ratios.values()))
    theirs = published_speedups(comparison.case.batch)
    labels = [_label(row) for _, row in theirs.iterrows()]
    left = left_of([*ratios, *labels])
    claims = [comparison.claim(metric).replace("] ", "]<br>") for metric in METRICS]
    write_after(figure, claims, [ratio.high for ratio in ratios.values()], list(ratios), left, row=1)
    add_published(figure, labels, theirs["speedup"], theirs["source"], left, row=2)
    times = [
        f"<b>{row['speedup']:.3g}x</b>, {row['unit']}<br>"
        f"{number(row['baseline_ms'], 4)} to {number(row['candidate_ms'], 4)}"
        for _, row in theirs.iterrows()
    ]
    write_after(figure, times, list(theirs["speedup"]), labels, left, row=2)
    figure.add_annotation(heading(f"<b>{MEASURED_HERE}</b>: {_pair(comparison)}", left=left), row=1, col=1)
    title = "Times faster: ours, and what the articles report"
    conditions = in_lines(subtitle_of(comparison), comparison.candidate.environment.machine)
    return _finish(
        figure, title, in_lines(conditions, *source_lines(theirs["source"]), OWN_SCALES), height=600, left=left
    )


def region_figure(comparison: Comparison) -> go.Figure:
    """The four Deep-Fusion regions: our speedup of each region above, the published one below."""
    frame = stage_frame(comparison)
    figure = make_subplots(rows=2, cols=1, vertical_spacing=0.24)
    ratios = {region: _ratio(frame, region) for region in FUSED_REGIONS}
    names = list(REGION_NAMES.values())
    figure.add_bar(
        x=list(ratios.values()),
        y=names,
        orientation="h",
        name=MEASURED_HERE,
        marker_color=[STAGE_COLORS[region] for region in FUSED_REGIONS],
        hovertemplate="%{y}: %{x:.2f}x<extra>" + MEASURED_HERE + "</extra>",
        row=1,
        col=1,
    )
    left = left_of(names)
    texts = ["one side does not time it alone" if value is None else f"{number(value)}x" for value in ratios.values()]
    known = [ratio for ratio in ratios.values() if ratio is not None]
    write_after(figure, texts, [ratio or min(known, default=1.0) for ratio in ratios.values()], names, left, row=1)
    theirs = published("deep-fusion")
    add_published(figure, names, theirs["value"], theirs["source"], left, row=2)
    write_after(figure, [f"{value:.3g}x" for value in theirs["value"]], list(theirs["value"]), names, left, row=2)
    figure.add_annotation(heading(f"<b>{MEASURED_HERE}</b>: {_pair(comparison)}", left=left), row=1, col=1)
    title = "Times faster in each of the four fused regions"
    subtitle = in_lines(stages_subtitle(comparison), *source_lines(theirs["source"] + UNFUSED), OWN_SCALES)
    return _finish(figure, title, subtitle, height=480, left=left)


def source_lines(sources: Iterable[str]) -> list[str]:
    """The sources of published figures, each once, for a subtitle."""
    return [f"{NOT_MEASURED_HERE}: {source}" for source in dict.fromkeys(sources)]


def add_measured(figure: go.Figure, labels: Sequence[str], ratios: Sequence[Ratio]) -> None:
    """Adds bars of our ratios, with their intervals, to the first panel."""
    values = [ratio.value for ratio in ratios]
    figure.add_bar(
        x=values,
        y=list(labels),
        orientation="h",
        name=MEASURED_HERE,
        marker_color=SIDE_COLORS["candidate"],
        error_x=whiskers(values, [ratio.low for ratio in ratios], [ratio.high for ratio in ratios]),
        hovertemplate="%{y}: %{x:.2f}x<extra>" + MEASURED_HERE + "</extra>",
        row=1,
        col=1,
    )


def add_published(
    figure: go.Figure,
    labels: Sequence[str],
    values: Iterable[float],
    sources: Iterable[str],
    left: int,
    *,
    row: int,
    unit: str = RATIO,
) -> None:
    """Adds bars of published figures on a background of their own. left: the margin in pixels."""
    figure.add_bar(
        x=list(values),
        y=list(labels),
        orientation="h",
        name=NOT_MEASURED_HERE,
        marker={
            "color": PUBLISHED_PAPER,
            "line": {"color": PUBLISHED, "width": 1.6},
            "pattern": {"shape": "/", "fgcolor": PUBLISHED, "size": 7, "solidity": 0.25},
        },
        customdata=list(sources),
        hovertemplate="%{x:.2f}" + unit + "<br>%{customdata}<extra>" + NOT_MEASURED_HERE + "</extra>",
        row=row,
        col=1,
    )
    figure.add_shape(
        type="rect", xref="x domain", yref="y domain", x0=0, x1=1, y0=0, y1=1, layer="below", line_width=0,
        fillcolor=PUBLISHED_PAPER, row=row, col=1,
    )  # fmt: skip
    figure.add_annotation(heading(f"<b>{NOT_MEASURED_HERE}</b>", PUBLISHED, left), row=row, col=1)


def _finish(figure: go.Figure, title: str, subtitle: str, *, height: int, left: int) -> go.Figure:
    figure.update_yaxes(autorange="reversed")
    return finish(figure, title, subtitle, height).update_layout(margin_l=left)


def _pair(comparison: Comparison) -> str:
    return f"{comparison.candidate.name} against {comparison.baseline.name}"


def _label(row: pd.Series) -> str:
    hardware = "hardware not stated" if row["hardware"] == "not stated" else row["hardware"]
    gpus = f"{row['gpus']} GPU" + ("s" if row["gpus"] > 1 else "")
    sides = f"{row['candidate']} / {row['baseline']}"
    return in_lines(f"{row['model']}, batch {row['batch']}", folded(f"{gpus}, {hardware}", LABEL), folded(sides, LABEL))


def _ratio(frame: pd.DataFrame, region: str) -> float | None:
    if region not in frame.index or not frame.loc[region].all():
        return None
    return float(frame.loc[region, "baseline"] / frame.loc[region, "candidate"])
