"""The room that words take, and the room that this leaves to bars and axes on a narrow page."""

import html
import math
import re
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

BREAK = "<br>"
NARROW = 480  # pixels: the least width that figures are made for; a narrower page scales them down
THIN, WIDE = set("ijltfrI.,:;'|()[]/! "), set("MW%@+→")
SHORT_BAR = 0.2  # the least share of an axis that the longest bar keeps
EDGE, GAP = 12, 20  # pixels left of words at the edge of a figure, and around words next to a bar
ORDERS = 10.0  # ratios that differ by this factor get a logarithmic axis
SHARE_STEPS, MOST_TICKS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2), 7  # between ticks of shares
RATIO = "x"  # the unit of bars that say how many times faster
STEPS, MOST_POWERS = (1, 2, 5), 4  # the ticks of a logarithmic axis, times powers of ten; of more powers only the first


def width_of(text: str, size: float) -> float:
    """Pixels of the longest line of `text` in a rather wide font of `size` pixels."""
    lines = (html.unescape(re.sub(r"<[^>]*>", "", line)) for line in text.split(BREAK))
    return size * max(sum(map(_letter, line)) for line in lines)


def _letter(letter: str) -> float:
    if letter in THIN:
        return 0.36
    return 0.86 if letter in WIDE else 0.7 if letter.isupper() else 0.62


def lines_of(text: str, size: float, width: float) -> list[str]:
    """`text` broken between words into lines of `width` pixels; no lines for an empty text."""
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
    """`text` in lines of `width` pixels."""
    return BREAK.join(lines_of(text, size, width))


def left_of(labels: Sequence[str], size: float = 13) -> int:
    """The margin that the labels of a vertical axis need."""
    return math.ceil(max((width_of(label, size) for label in labels), default=0)) + 24


def bars_end(ends: Sequence[float], texts: Sequence[str], left: float, *, size: float = 14, right: float = 20) -> float:
    """The end of an axis from 0 on which each text has room after its bar. left, right: margins in pixels."""
    width = NARROW - left - right
    return max((end / _share(text, width, size) for end, text in zip(ends, texts, strict=True)), default=1.0) or 1.0


def shares_axis(end: float, *, whole: float = 1.0) -> dict[str, Any]:
    """An axis of shares from 0. It may be longer than the whole, for words after bars, but has no ticks there."""
    step = next((step for step in SHARE_STEPS if end <= MOST_TICKS * step * whole), SHARE_STEPS[-1])
    ticks = [place * step for place in range(math.floor(min(end / whole, 1.0) / step + 1e-9) + 1)]
    return {
        "range": [0, end],
        "tickvals": [tick * whole for tick in ticks],
        "ticktext": [f"{100 * tick:g}%" for tick in ticks],
    }


def bars_axis(
    ends: Sequence[float], texts: Sequence[str], left: float, *, size: float = 14, unit: str = RATIO, log: bool = True
) -> dict[str, Any]:
    """The axis of bars with a text after each. unit: of the bars.

    log: the axis is logarithmic if the bars differ by an order of magnitude. Every other axis begins at 0.
    """
    least, most = min(ends, default=1.0), max(ends, default=1.0)
    if not log or least <= 0 or most < ORDERS * least:
        return {"range": [0, bars_end(ends, texts, left, size=size)], "ticksuffix": unit}
    begin, width = min(1.0, 0.8 * least), NARROW - left - 20
    spans = (math.log10(end / begin) / _share(text, width, size) for end, text in zip(ends, texts, strict=True))
    low = math.log10(begin)
    high = low + max(spans)
    powers = range(math.floor(low), math.ceil(high) + 1)
    steps = STEPS if len(powers) <= MOST_POWERS else (1,)
    ticks = [step * 10.0**power for power in powers[:: math.ceil(len(powers) / MOST_TICKS)] for step in steps]
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
    """The share of an axis of `width` pixels that a bar may take next to its text."""
    return max(SHORT_BAR, 1 - (width_of(text, size) + GAP) / width)


def legend_below(figure: go.Figure, names: Sequence[str], left: int, axis: int = 52) -> go.Figure:
    """Gives a finished figure its left margin, and a legend under `axis` pixels for the words of the axis.

    The legend has room for the rows that `names` take on a narrow page.
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
