"""Measured and published figures, in two panels with an axis each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
    theirs = published_speedups(comparison.case.batch)
    labels = [
        row_label(row, f"{row['gpus']} GPU{'s' * (row['gpus'] > 1)}", f"{row['candidate']} / {row['baseline']}")
        for _, row in theirs.iterrows()
    ]
    left = left_of([*ratios, *labels])
    claims = [comparison.claim(metric).replace("] ", "]<br>") for metric in METRICS]
    add_measured(figure, ratios, claims, left, _pair(comparison))
    times = [
        f"<b>{row['speedup']:.3g}x</b>, {row['unit']}<br>"
        f"{number(row['baseline_ms'], 4)} to {number(row['candidate_ms'], 4)}"
        for _, row in theirs.iterrows()
    ]
    add_published(figure, labels, theirs["speedup"], theirs["source"], times, left, row=2)
    title = "Times faster: ours, and what the articles report"
    machine, sources = comparison.candidate.environment.machine, source_lines(theirs["source"])
    return finish(figure, title, in_lines(subtitle_of(comparison), machine, *sources, OWN_SCALES), 600, left=left)


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
    gains = [f"{value:.3g}x" for value in theirs["value"]]
    add_published(figure, names, theirs["value"], theirs["source"], gains, left, row=2)
    figure.update_yaxes(autorange="reversed")
    figure.add_annotation(heading(f"<b>{MEASURED_HERE}</b>: {_pair(comparison)}", left=left), row=1, col=1)
    title = "Times faster in each of the four fused regions"
    subtitle = in_lines(stages_subtitle(comparison), *source_lines(theirs["source"] + UNFUSED), OWN_SCALES)
    return finish(figure, title, subtitle, height=480, left=left)


def source_lines(sources: Iterable[str]) -> list[str]:
    """The sources of published figures, each once, for a subtitle."""
    return [f"{NOT_MEASURED_HERE}: {source}" for source in dict.fromkeys(sources)]


def row_label(row: pd.Series, gpus: str, method: str) -> str:
    """The name of a published figure in lines: model and batch, GPUs, method."""
    hardware = "hardware not stated" if row["hardware"] == "not stated" else row["hardware"]
    return in_lines(
        f"{row['model']}, batch {row['batch']}", folded(f"{gpus}, {hardware}", LABEL), folded(method, LABEL)
    )


def add_measured(
    figure: go.Figure, ratios: Mapping[str, Ratio], texts: Sequence[str], left: int, compared: str
) -> None:
    """Adds our ratios by name to the first panel: a bar with its interval and a text each. compared: the sides."""
    values, lows, highs = ([getattr(ratio, name) for ratio in ratios.values()] for name in ("value", "low", "high"))
    figure.add_bar(
        x=values,
        y=list(ratios),
        orientation="h",
        name=MEASURED_HERE,
        marker_color=SIDE_COLORS["candidate"],
        error_x=whiskers(values, lows, highs),
        hovertemplate="%{y}: %{x:.2f}x<extra>" + MEASURED_HERE + "</extra>",
        row=1,
        col=1,
    )
    write_after(figure, texts, highs, list(ratios), left, row=1)
    figure.update_yaxes(autorange="reversed", row=1, col=1)
    figure.add_annotation(heading(f"<b>{MEASURED_HERE}</b>: {compared}", left=left), row=1, col=1)


def add_published(
    figure: go.Figure,
    labels: Sequence[str],
    values: Iterable[float],
    sources: Iterable[str],
    texts: Sequence[str],
    left: int,
    *,
    row: int,
    unit: str = RATIO,
) -> None:
    """Adds a panel of published figures on a background of its own: a bar and a text each.

    left: the margin in pixels. unit: of the values.
    """
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
    write_after(figure, texts, list(values), labels, left, unit=unit, row=row)
    figure.update_yaxes(autorange="reversed", row=row, col=1)
    figure.add_annotation(heading(f"<b>{NOT_MEASURED_HERE}</b>", PUBLISHED, left), row=row, col=1)


def _pair(comparison: Comparison) -> str:
    return f"{comparison.candidate.name} against {comparison.baseline.name}"


def _ratio(frame: pd.DataFrame, region: str) -> float | None:
    if region not in frame.index or not frame.loc[region].all():
        return None
    return float(frame.loc[region, "baseline"] / frame.loc[region, "candidate"])
