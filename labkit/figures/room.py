"""How much room words take, and what that leaves to bars and axes: figures have to hold theirs on a narrow page."""

import html
import math
import re
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

BREAK = "<br>"
NARROW = 480  # pixels: the least width that figures are made for; a page that is narrower makes them smaller
THIN, WIDE = set("ijltfrI.,:;'|()[]/! "), set("MW%@+→")
SHORT_BAR = 0.2  # of an axis, at least, that is left to the longest bar
EDGE, GAP = 12, 20  # pixels left of words at the edge of a figure, and around those beside a bar
ORDERS = 10.0  # ratios that differ by so many times stand on a logarithmic axis
SHARE_STEPS, MOST_TICKS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2), 7  # between ticks of shares
STEPS = (1, 2, 5)  # the ticks of a logarithmic axis, times powers of ten


def width_of(text: str, size: float) -> float:
    """Pixels of the longest line of `text`, in a font that is rather wide, in letters of that many pixels."""
    lines = (html.unescape(re.sub(r"<[^>]*>", "", line)) for line in text.split(BREAK))
    return size * max(sum(map(_letter, line)) for line in lines)


def _letter(letter: str) -> float:
    if letter in THIN:
        return 0.36
    return 0.86 if letter in WIDE else 0.7 if letter.isupper() else 0.62


def lines_of(text: str, size: float, width: float) -> list[str]:
    """`text` broken between words into lines of that many pixels; none for no text."""
    lines: list[str] = []
    for part in text.split(BREAK) if text else ():
        line = ""
        for word in part.split(" "):
            longer = f"{line} {word}" if line else word
            if line and width_of(longer, size) > width:
                lines.append(line)
                longer = word
            line = longer
        lines.append(line)
    return lines


def folded(text: str, width: float = 150, size: float = 13) -> str:
    """`text` in lines of that many pixels."""
    return BREAK.join(lines_of(text, size, width))


def left_of(labels: Sequence[str], size: float = 13) -> int:
    """The margin that the labels of a vertical axis need."""
    return math.ceil(max((width_of(label, size) for label in labels), default=0)) + 24


def bars_end(ends: Sequence[float], texts: Sequence[str], left: float, *, size: float = 14, right: float = 20) -> float:
    """Where an axis from 0 has to end so that each text has room behind its bar. left, right: margins in pixels."""
    width = NARROW - left - right
    return max((end / _share(text, width, size) for end, text in zip(ends, texts, strict=True)), default=1.0) or 1.0


def shares_axis(end: float, *, whole: float = 1.0) -> dict[str, Any]:
    """An axis of shares from 0, which may be longer than the whole for words behind bars, but has no tick there."""
    step = next((step for step in SHARE_STEPS if end <= MOST_TICKS * step * whole), SHARE_STEPS[-1])
    ticks = [place * step for place in range(math.floor(min(end / whole, 1.0) / step + 1e-9) + 1)]
    return {
        "range": [0, end],
        "tickvals": [tick * whole for tick in ticks],
        "ticktext": [f"{100 * tick:g}%" for tick in ticks],
    }


def ratio_axis(
    ends: Sequence[float], texts: Sequence[str], left: float, *, size: float = 14, unit: str = "x"
) -> dict[str, Any]:
    """The axis of bars of ratios with a text behind each, logarithmic where they differ by orders of magnitude. unit:
    of other figures than ratios.
    """
    least, most = min(ends, default=1.0), max(ends, default=1.0)
    if least <= 0 or most < ORDERS * least:
        return {"range": [0, bars_end(ends, texts, left, size=size)], "ticksuffix": unit}
    begin, width = min(1.0, 0.8 * least), NARROW - left - 20
    spans = (math.log10(end / begin) / _share(text, width, size) for end, text in zip(ends, texts, strict=True))
    low = math.log10(begin)
    high = low + max(spans)
    powers = range(math.floor(low), math.ceil(high) + 1)
    ticks = [step * 10.0**power for power in powers for step in STEPS]
    shown = [tick for tick in ticks if low <= math.log10(tick) <= high]
    title = {"text": "(log)", "standoff": 0}
    return {
        "type": "log",
        "title": title,
        "range": [low, high],
        "tickvals": shown,
        "ticktext": [f"{tick:g}{unit}" for tick in shown],
    }


def _share(text: str, width: float, size: float) -> float:
    """Of an axis of so many pixels, what a bar may take beside its text."""
    return max(SHORT_BAR, 1 - (width_of(text, size) + GAP) / width)


def legend_below(figure: go.Figure, names: Sequence[str], left: int, axis: int = 52) -> go.Figure:
    """Gives a finished figure its left margin and, under `axis` pixels for the words of the axis, a legend, with room
    for as many rows as these names take on a narrow page.
    """
    entry = max((width_of(name, 12) for name in names), default=0) + 44
    room = 19 * math.ceil(len(names) / max(1, (NARROW - left - 20) // entry)) + 12
    height = figure.layout.height + room
    place = {"x": EDGE / NARROW, "xref": "container", "y": room / height, "yref": "container", "yanchor": "top"}
    return figure.update_layout(
        showlegend=True,
        legend={"orientation": "h", "traceorder": "normal", "font": {"size": 12}, **place},
        height=height,
        margin={"l": left, "b": axis + room},
    )
