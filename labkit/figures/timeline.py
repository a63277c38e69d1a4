"""A timeline for a page: what every thread and stream did, coloured by stage, in as many bars as a page can carry."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from plotly.subplots import make_subplots

from labkit.figures.frames import number
from labkit.figures.room import left_of, legend_below
from labkit.figures.theme import GRID, SOFT, STAGE_COLORS, finish
from labkit.nsys.timeline.events import label, process_name
from labkit.nsys.timeline.lanes import Lanes, Traces, build_lanes
from labkit.nsys.timeline.rectangles import Rectangles, rectangles
from labkit.nsys.timeline.shades import OTHER, SHADES, STEP
from labkit.nsys.timeline.strips import API, GPU, OPS, RANGES, Strip
from labkit.nsys.timeline.view import view

SHADE_COLORS = {**{stage.value: color for stage, color in STAGE_COLORS.items()}, STEP: "#dfe4ea", OTHER: "#b3bcc8"}
MOST_BARS = 5_000  # beside plotly.js they make a page of less than 2 MB, and one that a browser still pans
COLUMNS = (16_000, 8_000, 4_000, 2_000, 1_000, 500, 250, 100)  # how finely the time is cut, if the bars allow it
LABELLED = 0.03  # share of the time from which a bar has its name on it
TALL = {RANGES: 1.0, OPS: 0.8, API: 0.7, GPU: 1.2}  # of a lane
NAMES = {OPS: "operators", API: "CUDA calls"}
HOVER = 60  # characters of a name in a bar's hover
UNIT, BETWEEN, HEADING = 22, 0.3, 1.1  # pixels; the rest in units


@dataclass(frozen=True)
class PlacedStrips:
    """The strips of a trace that have bars, from top to bottom: the height of their lanes and the middle of each."""

    strips: list[Strip]
    middle: dict[int, float]  # of a lane
    headings: list[tuple[float, str]]
    height: float


def timeline(
    traces: Traces, *, window: tuple[float, float] | None = None, steps: int | range | None = None
) -> go.Figure:
    """One trace, or several under each other on one axis, each from its own zero: the start of its first decode step.

    All of the time, a `window` of it in milliseconds, or decode `steps`: the first n, or a range. Events too narrow to
    be told apart are merged; the subtitle counts them. Raises TraceError where there is nothing to draw.
    """
    lanes = build_lanes(traces)
    begin, end = view(lanes, window, steps)
    for columns in COLUMNS:
        bars = rectangles(lanes, begin, end, columns)
        if len(bars) <= MOST_BARS:
            break
    placed = [_placed(lanes, at, np.unique(bars.lane)) for at in range(len(lanes.traces))]
    heights = [each.height for each in placed]
    figure = make_subplots(len(placed), 1, shared_xaxes=True, row_heights=heights, vertical_spacing=0.1 / len(placed))
    for row, each in enumerate(placed, 1):
        for strip in each.strips:
            figure.add_trace(_bars(lanes, bars, strip, each, (begin, end)), row=row, col=1)
        _dress(figure, each, row)
    labels = [NAMES.get(strip.kind, strip.label) for each in placed for strip in each.strips]
    for shade in np.unique(bars.shade):
        figure.add_trace(_legend_entry(SHADES[shade]))
    figure.update_xaxes(range=[begin / 1e6, end / 1e6], ticksuffix=" ms", title=None, nticks=7)
    figure.update_xaxes(title=f"time from the {lanes.aligned}", row=len(placed), col=1)
    title = f"Timeline: {' above '.join(lanes.names)}"
    finish(figure, title, _counted(lanes, bars, begin, end, columns), height=round(sum(heights) * UNIT) + 80, top=8)
    legend_below(figure, [SHADES[shade] for shade in np.unique(bars.shade)], left_of(labels, 12), axis=60)
    figure.update_layout(legend={"itemclick": False, "itemdoubleclick": False})
    return figure.update_layout(barmode="overlay", bargap=0, uniformtext={"minsize": 10, "mode": "hide"})


def _placed(lanes: Lanes, at: int, drawn: NDArray[np.int32]) -> PlacedStrips:
    strips = [
        strip
        for strip in lanes.strips
        if strip.trace == at and np.isin(range(strip.first, strip.first + strip.lanes), drawn).any()
    ]
    middle: dict[int, float] = {}
    headings: list[tuple[float, str]] = []
    y, process = 0.0, None
    for strip in strips:
        if strip.process != process:
            process = strip.process
            name = process_name(lanes.traces[at], process)
            headings.append((y + HEADING / 2, f"<b>{lanes.names[at]}</b>, {name}" if len(lanes.traces) > 1 else name))
            y += HEADING
        for lane in range(strip.first, strip.first + strip.lanes):
            middle[lane] = y + TALL[strip.kind] / 2
            y += TALL[strip.kind]
        y += BETWEEN
    return PlacedStrips(strips, middle, headings, max(y, 1.0))


def _bars(lanes: Lanes, bars: Rectangles, strip: Strip, placed: PlacedStrips, window: tuple[int, int]) -> go.Bar:
    """Cut to the window, so that a name is in the middle of what is to be seen."""
    mine = np.flatnonzero((bars.lane >= strip.first) & (bars.lane < strip.first + strip.lanes))
    start = np.maximum(bars.start[mine], window[0])
    length = np.minimum(bars.end[mine], window[1]) - start
    single = bars.event[mine]
    names = [label(lanes, int(lanes.name[event])) if event >= 0 else "" for event in single]
    wide = length >= (window[1] - window[0]) * LABELLED
    return go.Bar(
        name=strip.label,
        orientation="h",
        base=(start / 1e6).astype(np.float32),
        x=(length / 1e6).astype(np.float32),
        y=np.array([placed.middle[lane] for lane in bars.lane[mine]], np.float32),
        width=TALL[strip.kind] * 0.88,
        marker={
            "color": bars.shade[mine],
            "colorscale": _colorscale(),
            "cmin": -0.5,
            "cmax": len(SHADES) - 0.5,
            "opacity": np.where(single >= 0, 1.0, 0.35 + 0.65 * bars.busy[mine]).astype(np.float32),
            "line": {"width": 0},
        },
        text=[name.rsplit("/", 1)[-1] if shown else "" for name, shown in zip(names, wide, strict=True)],
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        textfont={"size": 11},
        hovertext=[_hover(lanes, bars, int(row), name) for row, name in zip(mine, names, strict=True)],
        hovertemplate="%{hovertext}<extra></extra>",
        showlegend=False,
    )


def _colorscale() -> list[tuple[float, str]]:
    edges = [edge / len(SHADES) for edge in range(len(SHADES) + 1)]
    return [(edge, SHADE_COLORS[shade]) for at, shade in enumerate(SHADES) for edge in edges[at : at + 2]]


def _hover(lanes: Lanes, bars: Rectangles, row: int, name: str) -> str:
    shade, ms = SHADES[bars.shade[row]], (bars.end[row] - bars.start[row]) / 1e6
    if bars.event[row] >= 0:
        return f"<b>{name[:HOVER]}</b><br>{shade}<br>{number(ms, 4)} ms"
    return f"<b>{bars.events[row]:,} events</b><br>mostly {shade}<br>{bars.busy[row]:.0%} of {number(ms)} ms"


def _dress(figure: go.Figure, placed: PlacedStrips, row: int) -> None:
    """Names of threads and streams beside their lanes, names of processes above them, a shade behind each."""
    ticks = {}
    for strip in placed.strips:
        top = placed.middle[strip.first] - TALL[strip.kind] / 2
        bottom = placed.middle[strip.first + strip.lanes - 1] + TALL[strip.kind] / 2
        ticks[(top + bottom) / 2] = NAMES.get(strip.kind, strip.label)
        figure.add_hrect(y0=top, y1=bottom, fillcolor=GRID, opacity=0.4, line_width=0, layer="below", row=row, col=1)
    for y, text in placed.headings:
        figure.add_annotation(
            text=text, x=0, xref="x domain", y=y, xanchor="left", showarrow=False, font={"size": 13}, row=row, col=1
        )
    figure.update_yaxes(
        range=[placed.height, 0], tickvals=list(ticks), ticktext=list(ticks.values()), showgrid=False,
        tickfont={"size": 12, "color": SOFT}, showline=False, ticks="", fixedrange=True, row=row, col=1,
    )  # fmt: skip


def _legend_entry(shade: str) -> go.Scatter:
    marker = {"color": SHADE_COLORS[shade], "symbol": "square", "size": 11}
    return go.Scatter(x=[None], y=[None], mode="markers", name=shade, marker=marker, hoverinfo="skip")


def _counted(lanes: Lanes, bars: Rectangles, begin: int, end: int, columns: int) -> str:
    alone, shown = int((bars.event >= 0).sum()), int(bars.events.sum())
    what = f"{shown:,} of {len(lanes):,} events" if shown < len(lanes) else f"all {len(lanes):,} events"
    parts = [f"{what} in {number((end - begin) / 1e6)} ms"]
    if shown > alone:
        narrow_us = (end - begin) / columns / 1e3
        least = f"{number(narrow_us, 2)} µs" if narrow_us < 1e3 else f"{number(narrow_us / 1e3, 2)} ms"
        parts.append(f"{alone:,} one by one, the others, shorter than {least}, in {len(bars) - alone:,} merged bars")
    if lanes.left_out:
        parts.append(f"{lanes.left_out:,} nested too deep to show")
    return "; ".join(parts)
