"""The theme of all figures: a colour per stage and per side, the type sizes, and titles with their room."""

import math
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from labkit.figures.room import BREAK, EDGE, NARROW, RATIO, bars_axis, lines_of
from labkit.stages import OUTSIDE, Stage

# The four Deep-Fusion regions have the full colours; the GEMM that follows a region has a tint of it.
STAGE_COLORS: dict[Stage, str] = {
    Stage.EMBED: "#c3cad3",
    Stage.FETCH: "#5b3a29",
    Stage.FETCH_KV: "#a3795c",
    Stage.QKV: "#2f6db5",
    Stage.ATTENTION: "#d9702b",
    Stage.ATTN_OUT: "#f0b48a",
    Stage.MLP: "#2f8f5b",
    Stage.MLP_OUT: "#98cdb0",
    Stage.ROUTE: "#c2508f",
    Stage.EXPERTS: "#1f7a4d",
    Stage.RESIDUAL: "#8159a8",
    Stage.QKV_MLP: "#2b8a96",
    Stage.OUTPUTS: "#c9c19a",
    Stage.ALL_REDUCE: "#b8433f",
    Stage.LM_HEAD: "#caa01e",
    Stage.SAMPLE: "#7d8896",
    Stage.RECV: "#e4b7c8",
    Stage.SEND: "#a8577a",
}
PART_COLORS = {**{str(stage): color for stage, color in STAGE_COLORS.items()}, OUTSIDE: "#46505c"}
BASELINE, CANDIDATE = "baseline", "candidate"
SIDE_COLORS = {BASELINE: "#9aa5b1", CANDIDATE: "#0b6e99"}
LIMIT = "#b42318"
PUBLISHED = "#a07a2c"
INK, SOFT, GRID, AXIS = "#1f2933", "#5f6c7b", "#e6e9ed", "#aab2bd"
PAPER, PUBLISHED_PAPER = "#ffffff", "#faf6ec"

TITLE, SUBTITLE, LINE_HEIGHT = 17, 13, 18  # pixels: the sizes of letters, and of a line of the subtitle
LIVE = NARROW - 2 * EDGE  # pixels of the lines of a title
MODEBAR = 32  # pixels of the buttons at the top, where a page has the title outside of the figure
TOP, RIGHT = 34, 20  # pixels: above the axes, for a heading; right of the axes
LOG = " (log)"  # ends the title of a logarithmic axis: its neighbour may be linear
META = "labkit"  # the key in a layout's meta for what a page has to know about the figure
CONFIG = {"displaylogo": False, "modeBarButtons": [["toImage", "zoom2d", "pan2d", "resetScale2d"]]}

_FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif'
_AXIS = {
    "gridcolor": GRID,
    "zeroline": False,
    "linecolor": AXIS,
    "ticklabelstandoff": 6,
    "title": {"font": {"size": 13, "color": SOFT}, "standoff": 8},
    "tickfont": {"size": 13},
    "showticksuffix": "last",
}
THEME = go.layout.Template(
    layout=go.Layout(
        font={"family": _FONT, "size": 14, "color": INK},
        title={"x": 0, "y": 1, "yanchor": "top", "pad": {"l": EDGE, "t": 14}, "font": {"size": TITLE}},
        paper_bgcolor=PAPER,
        plot_bgcolor=PAPER,
        xaxis=_AXIS | {"tickangle": 0},
        yaxis=_AXIS,
        margin={"l": 130, "r": RIGHT, "b": 52},
        bargap=0.35,
        hoverlabel={"font": {"family": _FONT, "size": 13}},
    )
)


def in_lines(*texts: str) -> str:
    """A subtitle of these texts, each on a line of its own. Empty texts are left out."""
    return BREAK.join(text for text in texts if text)


def finish(
    figure: go.Figure, title: str, subtitle: str, height: int, *, top: int = TOP, left: int | None = None
) -> go.Figure:
    """Gives `figure` the theme, a title, a subtitle that says what was measured, and `height` pixels below them.

    top: of these pixels, above the axes. left: pixels left of the axes; None: the theme's. The texts are broken into
    lines that fit a narrow window. A page with its own captions removes the texts and their room again.
    """
    for axis in (*figure.select_xaxes({"type": "log"}), *figure.select_yaxes({"type": "log"})):
        if axis.title.text and LOG.strip() not in axis.title.text:
            axis.title.text += LOG
    titles, subtitles = lines_of(title, TITLE, LIVE), lines_of(subtitle, SUBTITLE, LIVE)
    above = 16 + round(1.3 * TITLE) * len(titles) + LINE_HEIGHT * len(subtitles) + 6 * bool(subtitles)
    return figure.update_layout(
        template=THEME,
        height=above + height,
        margin={"t": above + top, "l": left},
        title={
            "text": BREAK.join(titles),
            "pad_t": 14 + 12 * (len(titles) - 1),  # plotly.js centres the lines where one would stand
            "subtitle": {"text": BREAK.join(subtitles), "font": {"size": SUBTITLE, "color": SOFT}},
        },
        meta={META: {"title": title, "subtitle": subtitle, "above": above}},
        showlegend=False,
    )


def heading(text: str, color: str = INK, left: float = 0) -> dict[str, object]:
    """An annotation above a panel, at the panel's left edge, or at the figure's if the axes are `left` pixels away."""
    place = {"xref": "x domain", "yref": "y domain", "x": 0, "y": 1, "xanchor": "left", "yanchor": "bottom"}
    shifts = {"xshift": EDGE - left if left else 0, "yshift": 6}  # upwards: a tick label may stand at the panel's top
    return {**place, **shifts, "text": text, "showarrow": False, "font": {"size": 14, "color": color}}


def panels(heights: Sequence[float], between: float) -> go.Figure:
    """A figure of panels below each other, of these heights in pixels, with `between` pixels from one to the next."""
    spacing = between / (sum(heights) + (len(heights) - 1) * between)
    return make_subplots(rows=len(heights), cols=1, row_heights=list(heights), vertical_spacing=spacing)


def write_after(
    figure: go.Figure,
    texts: Sequence[str],
    ends: Sequence[float],
    labels: Sequence[str],
    left: int,
    *,
    unit: str = RATIO,
    log: bool = True,
    row: int | None = None,
    size: float = 14,
    color: str = INK,
) -> None:
    """Writes a text after the end of each bar, and gives the axis of the bars room for the texts.

    labels: the names of the bars. left: the margin in pixels. unit, log: see `bars_axis`.
    """
    axis = bars_axis(ends, texts, left, size=size, unit=unit, log=log)
    panel = {} if row is None else {"row": row, "col": 1}
    logarithmic = axis.get("type") == "log"
    for text, end, label in zip(texts, ends, labels, strict=True):
        figure.add_annotation(
            text=text, x=math.log10(end) if logarithmic else end, y=label, xanchor="left", xshift=10, align="left",
            showarrow=False, font={"size": size, "color": color}, **panel,
        )  # fmt: skip
    figure.update_xaxes(**axis, **panel)
    if logarithmic and unit == RATIO and min(ends) < 1:
        figure.add_vline(x=1, line={"color": SOFT, "width": 1}, **panel)


def mark_line(figure: go.Figure, x: float, words: str, color: str, y: float, end: float = math.inf) -> None:
    """Draws a dotted line at `x` of a logarithmic axis from 1 to `end`, with words on the side that has more room.

    y: the height of the words, from 0 to 1.
    """
    figure.add_vline(x=x, line={"color": color, "width": 1.4, "dash": "dot"})
    side = {"xanchor": "left", "xshift": 5} if x**2 < end else {"xanchor": "right", "xshift": -5}
    figure.add_annotation(
        text=words, x=math.log10(x), yref="paper", y=y, yanchor="bottom", align="left", showarrow=False,
        font={"size": 12, "color": color}, **side,
    )  # fmt: skip


def whiskers(
    middles: Sequence[float],
    lows: Sequence[float],
    highs: Sequence[float],
) -> dict[str, Any]:
    """Error bars for points or bars at `middles`, from `lows` to `highs`."""
    return {
        "type": "data",
        "array": [high - middle for middle, high in zip(middles, highs, strict=True)],
        "arrayminus": [middle - low for middle, low in zip(middles, lows, strict=True)],
        "color": INK,
        "thickness": 1.4,
        "width": 5,
    }


def range_whiskers(middles: Sequence[float], samples: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Error bars from the least to the greatest of the samples of each point."""
    return whiskers(middles, [min(group) for group in samples], [max(group) for group in samples])


def slider(steps: list[dict[str, Any]], active: int, prefix: str, *, pad_bottom: int) -> dict[str, Any]:
    """A slider above the axes. prefix: of the label of the current step. pad_bottom: pixels between it and the axes."""
    return {
        "active": active, "steps": steps, "x": 0, "len": 1, "y": 1, "yanchor": "bottom",
        "pad": {"b": pad_bottom, "t": 0}, "bgcolor": GRID, "bordercolor": AXIS, "ticklen": 0, "minorticklen": 0,
        "currentvalue": {"prefix": prefix, "font": {"size": 13, "color": INK}, "xanchor": "left"},
        "font": {"size": 1, "color": "rgba(0,0,0,0)"},
    }  # fmt: skip
