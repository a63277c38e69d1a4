"""A timeline for a page: what every thread and stream did, coloured by stage, in at most MOST_BARS bars."""

from __future__ import annotations

import html
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from plotly.subplots import make_subplots

from labkit.figures.room import left_of, legend_below
from labkit.figures.theme import GRID, PAPER, SOFT, STAGE_COLORS, finish
from labkit.nsys.tables.families import (
    COMMUNICATION,
    CONVOLUTION,
    COPY,
    ELEMENTWISE,
    INDEXING,
    MATMUL,
    NORMALISATION,
    REDUCTION,
    SOFTMAX,
    WAITING,
)
from labkit.nsys.tables.kernel_names import cut
from labkit.nsys.timeline.events import label, process_name
from labkit.nsys.timeline.lanes import Lanes, Traces, build_lanes
from labkit.nsys.timeline.rectangles import Rectangles, rectangles
from labkit.nsys.timeline.shades import OTHER, SHADES, STEP
from labkit.nsys.timeline.strips import API, GPU, OPS, OS, RANGES, Strip
from labkit.nsys.timeline.view import view
from labkit.studies.frames import number

FAMILY_COLORS = {
    COMMUNICATION: "#b8433f", CONVOLUTION: "#2b8a96", MATMUL: "#2f6db5", NORMALISATION: "#8159a8", SOFTMAX: "#e3a0bd",
    INDEXING: "#98cdb0", COPY: "#c9c19a", REDUCTION: "#caa01e", ELEMENTWISE: "#2f8f5b",
    WAITING: "#e0692b",
}  # fmt: skip
SHADE_COLORS = {
    **{stage.value: color for stage, color in STAGE_COLORS.items()},
    **{STEP: "#dfe4ea", OTHER: "#b3bcc8"},
    **FAMILY_COLORS,
}
NAME_COLORS = ("#5b8fd0", "#e0935c", "#63b088", "#a98bc9", "#cfae4e", "#6fb3bd")  # of ranges, by their names
MOST_BARS = 5_000  # with plotly.js they make a page of less than 2 MB, which a browser can still pan
COLUMNS = (16_000, 8_000, 4_000, 2_000, 1_000, 500, 250, 100)  # how finely the time is cut, if the bars allow it
LABELLED = 0.03  # share of the time from which a bar has its name on it
APART = 0.004  # share of the time from which a bar has an edge, so that neighbours do not look like one
TALL = {RANGES: 1.0, OPS: 0.8, API: 0.7, OS: 0.7, GPU: 1.2}  # heights of a lane, in units
HOVER, NAMED = 60, 30  # characters of a name in a bar's hover and in the legend
UNIT, BETWEEN, HEADING = 22, 0.3, 1.1  # pixels; the rest in units


@dataclass(frozen=True)
class PlacedStrips:
    """The strips of a trace that have bars, from top to bottom, and their places in units."""

    strips: list[Strip]
    middle: dict[int, float]  # of each lane
    headings: list[tuple[float, str]]  # place and text
    height: float  # of all strips


def timeline(
    traces: Traces, *, window: tuple[float, float] | None = None, steps: int | range | None = None
) -> go.Figure:
    """One trace, or several under each other on one axis. The zero of each is the start of its first decode step.

    Shows all of the time, a `window` in milliseconds, or decode `steps`: the first n, or a range. Events that are too
    narrow to be told apart are merged; the subtitle counts them. Raises TraceError where there is nothing to draw.
    """
    lanes = build_lanes(traces)
    begin, end = view(lanes, window, steps)
    for columns in COLUMNS:
        bars = rectangles(lanes, begin, end, columns)
        if len(bars) <= MOST_BARS:
            break
    colors, named = shade_colors(lanes), [_plain(shade, NAMED) for shade in lanes.shades]
    placed = [_placed(lanes, at, np.unique(bars.lane)) for at in range(len(lanes.traces))]
    heights = [panel.height for panel in placed]
    figure = make_subplots(len(placed), 1, shared_xaxes=True, row_heights=heights, vertical_spacing=0.1 / len(placed))
    for row, panel in enumerate(placed, 1):
        for strip in panel.strips:
            figure.add_trace(_bars(lanes, bars, strip, panel, (begin, end)), row=row, col=1)
        _dress(figure, panel, row)
    labels = [strip.title for panel in placed for strip in panel.strips]
    for shade in np.unique(bars.shade):
        marker = {"color": colors[shade], "symbol": "square", "size": 11}
        figure.add_scatter(x=[None], y=[None], mode="markers", name=named[shade], marker=marker, hoverinfo="skip")
    figure.update_xaxes(range=[begin / 1e6, end / 1e6], ticksuffix=" ms", title=None, nticks=7)
    figure.update_xaxes(title=f"time from the {lanes.aligned}", row=len(placed), col=1)
    title = f"Timeline: {' above '.join(lanes.names)}"
    finish(figure, title, _counted(lanes, bars, begin, end, columns), height=round(sum(heights) * UNIT) + 80, top=8)
    legend_below(figure, [named[shade] for shade in np.unique(bars.shade)], left_of(labels, 12), axis=60)
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
    """The bars of a strip, cut to the window, so that a name is in the middle of the visible part."""
    rows = np.flatnonzero((bars.lane >= strip.first) & (bars.lane < strip.first + strip.lanes))
    start = np.maximum(bars.start[rows], window[0])
    length = np.minimum(bars.end[rows], window[1]) - start
    single = bars.event[rows]
    names = [label(lanes, int(lanes.name[event])) if event >= 0 else "" for event in single]
    wide = length >= (window[1] - window[0]) * LABELLED
    apart = (window[1] - window[0]) * APART
    return go.Bar(
        name=strip.label,
        orientation="h",
        base=(start / 1e6).astype(np.float32),
        x=(length / 1e6).astype(np.float32),
        y=np.array([placed.middle[lane] for lane in bars.lane[rows]], np.float32),
        width=TALL[strip.kind] * 0.88,
        marker={
            "color": bars.shade[rows],
            "colorscale": _colorscale(shade_colors(lanes)),
            "cmin": -0.5,
            "cmax": len(lanes.shades) - 0.5,
            "opacity": np.where(single >= 0, 1.0, 0.35 + 0.65 * bars.busy[rows]).astype(np.float32),
            "line": {"color": PAPER, "width": np.where(length >= apart, 1, 0)},
        },
        text=[_plain(name.rsplit("/", 1)[-1], HOVER) if shown else "" for name, shown in zip(names, wide, strict=True)],
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        textfont={"size": 11},
        hovertext=[_hover(lanes, bars, int(row), name) for row, name in zip(rows, names, strict=True)],
        hovertemplate="%{hovertext}<extra></extra>",
        showlegend=False,
    )


def shade_colors(lanes: Lanes) -> list[str]:
    """The colour of each of `lanes.shades`."""
    named = len(lanes.shades) - len(SHADES)
    return [*(SHADE_COLORS[shade] for shade in SHADES), *NAME_COLORS[:named]]


def _colorscale(colors: list[str]) -> list[tuple[float, str]]:
    edges = [edge / len(colors) for edge in range(len(colors) + 1)]
    return [(edge, color) for at, color in enumerate(colors) for edge in edges[at : at + 2]]


def _hover(lanes: Lanes, bars: Rectangles, row: int, name: str) -> str:
    shade, ms = _plain(lanes.shades[bars.shade[row]], NAMED), (bars.end[row] - bars.start[row]) / 1e6
    if bars.event[row] >= 0:
        return f"<b>{_plain(name, HOVER)}</b><br>{shade}<br>{number(ms, 4)} ms"
    return f"<b>{bars.events[row]:,} events</b><br>mostly {shade}<br>{bars.busy[row]:.0%} of {number(ms)} ms"


def _plain(text: str, longest: int) -> str:
    """The text as plotly shows it, cut to `longest` characters and with its markup escaped."""
    return html.escape(cut(text, longest), quote=False)


def _dress(figure: go.Figure, placed: PlacedStrips, row: int) -> None:
    """Adds names of threads and streams next to their lanes, names of processes above them, and background shades."""
    ticks = {}
    for strip in placed.strips:
        top = placed.middle[strip.first] - TALL[strip.kind] / 2
        bottom = placed.middle[strip.first + strip.lanes - 1] + TALL[strip.kind] / 2
        ticks[(top + bottom) / 2] = strip.title
        figure.add_hrect(y0=top, y1=bottom, fillcolor=GRID, opacity=0.4, line_width=0, layer="below", row=row, col=1)
    for y, text in placed.headings:
        figure.add_annotation(
            text=text, x=0, xref="x domain", y=y, xanchor="left", showarrow=False, font={"size": 13}, row=row, col=1
        )
    figure.update_yaxes(
        range=[placed.height, 0], tickvals=list(ticks), ticktext=list(ticks.values()), showgrid=False,
        tickfont={"size": 12, "color": SOFT}, showline=False, ticks="", fixedrange=True, row=row, col=1,
    )  # fmt: skip


def _counted(lanes: Lanes, bars: Rectangles, begin: int, end: int, columns: int) -> str:
    alone, shown = int((bars.event >= 0).sum()), int(bars.events.sum())
    counted = f"{shown:,} of {len(lanes):,} events" if shown < len(lanes) else f"all {len(lanes):,} events"
    parts = [f"{counted} in {number((end - begin) / 1e6)} ms"]
    if shown > alone:
        narrow_us = (end - begin) / columns / 1e3
        least = f"{number(narrow_us, 2)} µs" if narrow_us < 1e3 else f"{number(narrow_us / 1e3, 2)} ms"
        parts.append(f"{alone:,} one by one, the others, shorter than {least}, in {len(bars) - alone:,} merged bars")
    if lanes.left_out:
        parts.append(f"{lanes.left_out:,} nested too deep to show")
    return "; ".join(parts)
