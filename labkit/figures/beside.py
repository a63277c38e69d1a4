"""Figures of what was measured here and what others have published, in two panels with an axis each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from labkit.figures.frames import number, stage_frame
from labkit.figures.summary import METRICS, stages_subtitle, subtitle_of
from labkit.figures.theme import INK, PUBLISHED, PUBLISHED_PAPER, SIDE_COLORS, STAGE_COLORS, finish, heading
from labkit.published import NOT_MEASURED_HERE, published, published_speedups
from labkit.stages import FUSED_REGIONS

if TYPE_CHECKING:
    import pandas as pd

    from labkit.harness import Comparison

MEASURED_HERE = "measured here"
UNFUSED = "<br>against unfused cuBLAS kernels; model and hardware not stated"
REGION_NAMES = dict(zip(FUSED_REGIONS, ("1 QKV", "2 attention", "3 MLP", "4 bias + residual"), strict=True))


def published_figure(comparison: Comparison) -> go.Figure:
    """Above, our speedups with their intervals; below, the speedups that follow from published latencies."""
    ratios = {name: comparison.ratio(metric) for metric, name in METRICS.items()}
    figure = make_subplots(rows=2, cols=1, row_heights=[0.4, 0.6], vertical_spacing=0.2)
    ours = go.Bar(
        x=[ratio.value for ratio in ratios.values()],
        y=list(ratios),
        orientation="h",
        name=MEASURED_HERE,
        marker_color=SIDE_COLORS["candidate"],
        error_x={
            "type": "data",
            "array": [ratio.high - ratio.value for ratio in ratios.values()],
            "arrayminus": [ratio.value - ratio.low for ratio in ratios.values()],
            "color": INK,
            "thickness": 1.4,
            "width": 5,
        },
        hovertemplate="%{y}: %{x:.2f}x<extra>" + MEASURED_HERE + "</extra>",
    )
    figure.add_trace(ours, row=1, col=1)
    for metric, name in METRICS.items():
        _write(figure, comparison.claim(metric), ratios[name].high, name, row=1, col=1)
    theirs = published_speedups(comparison.case.batch)
    labels = [_label(row) for _, row in theirs.iterrows()]
    add_published(figure, labels, theirs["speedup"], theirs["source"], row=2, col=1)
    for label, (_, row) in zip(labels, theirs.iterrows(), strict=True):
        times = f"{number(row['baseline_ms'], 4)} to {number(row['candidate_ms'], 4)} {row['unit']}"
        _write(figure, f"{row['speedup']:.3g}x, {times}", row["speedup"], label, row=2, col=1)
    machine = comparison.candidate.environment.machine
    figure.add_annotation(heading(f"<b>{MEASURED_HERE}</b>: {_pair(comparison)} on {machine}"), row=1, col=1)
    figure.update_xaxes(range=[0, max(ratio.high for ratio in ratios.values()) * 1.5], row=1, col=1)
    figure.update_xaxes(range=[0, theirs["speedup"].max() * 1.7], row=2, col=1)
    title = "Times faster: ours, and what the articles report"
    return _finish(figure, title, subtitle_of(comparison), height=640, left=330)


def region_figure(comparison: Comparison) -> go.Figure:
    """The four Deep-Fusion regions, with our speedup of each on the left and the published one on the right."""
    frame = stage_frame(comparison)
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.2)
    ratios = {region: _ratio(frame, region) for region in FUSED_REGIONS}
    ours = go.Bar(
        x=list(ratios.values()),
        y=list(REGION_NAMES.values()),
        orientation="h",
        name=MEASURED_HERE,
        marker_color=[STAGE_COLORS[region] for region in FUSED_REGIONS],
        hovertemplate="%{y}: %{x:.2f}x<extra>" + MEASURED_HERE + "</extra>",
    )
    figure.add_trace(ours, row=1, col=1)
    for region, ratio in ratios.items():
        text = "one side does not time it alone" if ratio is None else f"{number(ratio)}x"
        _write(figure, text, ratio or 0.0, REGION_NAMES[region], row=1, col=1)
    theirs = published("deep-fusion")
    names = list(REGION_NAMES.values())
    add_published(figure, names, theirs["value"], theirs["source"] + UNFUSED, row=1, col=2)
    for name, value in zip(names, theirs["value"], strict=True):
        _write(figure, f"{value:.3g}x", value, name, row=1, col=2)
    figure.add_annotation(heading(f"<b>{MEASURED_HERE}</b>: {_pair(comparison)}"), row=1, col=1)
    longest = max((ratio for ratio in ratios.values() if ratio), default=1.0)
    figure.update_xaxes(range=[0, longest * 1.25], row=1, col=1)
    figure.update_xaxes(range=[0, theirs["value"].max() * 1.25], row=1, col=2)
    title = "Times faster in each of the four fused regions"
    return _finish(figure, title, stages_subtitle(comparison), height=430, left=150)


def add_published(
    figure: go.Figure, labels: Sequence[str], values: Iterable[float], sources: Iterable[str], *, row: int, col: int
) -> None:
    """Add bars of published figures on a background of their own, with their sources below the panel."""
    values, sources = list(values), list(sources)
    bars = go.Bar(
        x=values,
        y=list(labels),
        orientation="h",
        name=NOT_MEASURED_HERE,
        marker={
            "color": PUBLISHED_PAPER,
            "line": {"color": PUBLISHED, "width": 1.6},
            "pattern": {"shape": "/", "fgcolor": PUBLISHED, "size": 7, "solidity": 0.25},
        },
        customdata=sources,
        hovertemplate="%{x:.2f}x<br>%{customdata}<extra>" + NOT_MEASURED_HERE + "</extra>",
    )
    figure.add_trace(bars, row=row, col=col)
    figure.add_shape(
        type="rect", xref="x domain", yref="y domain", x0=0, x1=1, y0=0, y1=1, layer="below", line_width=0,
        fillcolor=PUBLISHED_PAPER, row=row, col=col,
    )  # fmt: skip
    figure.add_annotation(heading(f"<b>{NOT_MEASURED_HERE}</b>", PUBLISHED), row=row, col=col)
    figure.add_annotation(
        text="<br>".join(dict.fromkeys(sources)), xref="paper", yref="paper", x=1, y=0, xanchor="right", yanchor="top",
        yshift=-40, align="right", showarrow=False, font={"size": 12, "color": PUBLISHED},
    )  # fmt: skip


def _finish(figure: go.Figure, title: str, subtitle: str, *, height: int, left: int) -> go.Figure:
    figure.update_xaxes(ticksuffix="x")
    figure.update_yaxes(autorange="reversed")
    return finish(figure, title, subtitle, height).update_layout(margin={"l": left, "b": 96})


def _pair(comparison: Comparison) -> str:
    return f"{comparison.candidate.name} against {comparison.baseline.name}"


def _write(figure: go.Figure, text: str, x: float, y: str, *, row: int, col: int) -> None:
    figure.add_annotation(text=text, x=x, y=y, xanchor="left", xshift=10, showarrow=False, row=row, col=col)


def _label(row: pd.Series) -> str:
    hardware = "hardware not stated" if row["hardware"] == "not stated" else row["hardware"]
    gpus = f"{row['gpus']} GPU" + ("s" if row["gpus"] > 1 else "")
    return f"{row['model']}, batch {row['batch']}, {gpus}, {hardware}<br>{row['candidate']} / {row['baseline']}"


def _ratio(frame: pd.DataFrame, region: str) -> float | None:
    if region not in frame.index or not frame.loc[region].all():
        return None
    return float(frame.loc[region, "baseline"] / frame.loc[region, "candidate"])
