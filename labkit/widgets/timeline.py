"""A timeline to pan and zoom. Python computes tiles; the browser draws the tiles that it has and requests others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import anywidget
import numpy as np
import traitlets
from IPython.display import display

from labkit.figures.timeline import shade_colors, timeline
from labkit.nsys.timeline import events
from labkit.nsys.timeline.lanes import Lanes, Traces, build_lanes, named_traces
from labkit.nsys.timeline.shades import SHADES, has_labels
from labkit.nsys.timeline.tiles import COLUMNS, Tiles
from labkit.nsys.timeline.view import view
from labkit.nsys.trace import Trace
from labkit.widgets.live import Slot, is_live

HERE = Path(__file__).parent
PARTS = ("tiles", "scene", "frame", "canvas", "panel", "view")  # in the order of their imports
WIDGET = (*(f"timeline_{part}.js" for part in PARTS), "timeline.js")
BUFFERS = {  # of a tile, as timeline_tiles.js expects them
    "start": np.float64,
    "end": np.float64,
    "event": np.int32,
    "lane": np.uint16,
    "shade": np.uint8,
    "name": np.int32,
    "rows": np.uint16,
    "columnShade": np.uint8,
    "columnFill": np.uint8,
}
LIKELY_PIXELS = 1400  # assumed width of the first view, whose tiles are sent with the widget
NAMED = 400  # longest events of a tile, whose names are sent with it
TEXT = 160  # characters of such a name
MARKS = 4000  # positions of search results that are sent


@cache
def script(files: tuple[str, ...] = WIDGET) -> str:
    """Several modules joined into one, because a widget can have only one."""
    sources = ((HERE / name).read_text(encoding="utf-8") for name in files)
    return "\n".join(re.sub(r"^import [^;]*;\n", "", source, flags=re.MULTILINE) for source in sources)


def traces_of(trace: Traces, other: Trace | None) -> Mapping[str, Trace]:
    """The traces of `trace` and `other`, by name. Names of a mapping stay; `other` gets one that is not among them."""
    if other is None:
        return named_traces(trace)
    if not isinstance(trace, Mapping):
        return named_traces([*([trace] if isinstance(trace, Trace) else trace), other])
    (name,) = named_traces(other)
    names = (name, *(f"{name} ({number})" for number in range(2, len(trace) + 2)))
    return {**trace, next(name for name in names if name not in trace): other}


class Timeline(anywidget.AnyWidget):
    """One trace, or several below each other on one axis, each from its own zero.

    It opens on all events, on a `window` in milliseconds, or on some decode `steps`. Raises TraceError if there is
    nothing to draw.
    """

    _esm = script()
    _css = HERE / "timeline.css"
    scene = traitlets.Dict().tag(sync=True)
    tiles: traitlets.List = traitlets.List().tag(sync=True)

    def __init__(
        self,
        trace: Traces,
        other: Trace | None = None,
        *,
        window: tuple[float, float] | None = None,
        steps: int | range | None = None,
    ) -> None:
        self._lanes = build_lanes(traces_of(trace, other))
        self._tiles = Tiles(self._lanes)
        self._search_state: tuple[str, np.ndarray, int] = ("", np.zeros(0, np.int64), 0)  # text, matches, position
        first = view(self._lanes, window, steps)
        super().__init__(scene=scene_of(self._lanes, self._tiles, first), tiles=self._first_tiles(*first))
        self.on_msg(self._answer)

    def _first_tiles(self, begin: int, end: int) -> list[dict[str, Any]]:
        """The tiles of the first view, so that it is drawn even while the kernel is busy."""
        column_ns = max((end - begin) / LIKELY_PIXELS, 1.0)
        level = min(max(self._tiles.exponent - int(np.log2(column_ns)), 0), self._tiles.levels - 1)
        wide = COLUMNS << (self._tiles.exponent - level)
        edges = np.clip(
            [begin - self._tiles.origin, end - self._tiles.origin], 0, (COLUMNS << self._tiles.exponent) - 1
        )
        indices = range(int(edges[0]) // wide, int(edges[1]) // wide + 1)
        keys = dict.fromkeys([(0, 0), *((level, index) for index in indices)])
        return [content | {"buffers": buffers} for content, buffers in (self._packed(*key) for key in keys)]

    def _packed(self, level: int, index: int) -> tuple[dict[str, Any], list[bytes]]:
        """A tile as a message: content and buffers."""
        lanes, tile = self._lanes, self._tiles.tile(level, index)
        chosen = tile.events
        start, end = lanes.start[chosen], lanes.end[chosen]
        longest = np.argsort(start - end)[:NAMED]
        texts = [[int(name), events.label(lanes, int(name))[:TEXT]] for name in np.unique(lanes.name[chosen[longest]])]
        columns: dict[str, np.ndarray] = {
            "start": start, "end": end, "event": chosen, "lane": lanes.lane[chosen], "shade": lanes.shade[chosen],
            "name": lanes.name[chosen], "rows": tile.lanes, "columnShade": tile.shade, "columnFill": tile.fill,
        }  # fmt: skip
        content = {"kind": "tile", "level": level, "index": index, "texts": texts}
        return content, [columns[name].astype(dtype).tobytes() for name, dtype in BUFFERS.items()]

    def _answer(self, _: Any, message: dict[str, Any], __: Any) -> None:
        """Answers a request of the browser. The answer carries the token of the view that sent it."""
        kind, reply = message.get("kind"), {"view": message.get("view"), "reveal": message.get("reveal", False)}
        if kind == "tiles":
            for level, index in message["tiles"]:
                self.send(*self._packed(level, index))
        elif kind == "search":
            self._search(message, reply)
        elif kind in ("details", "at", "neighbour"):
            event = {
                "details": lambda: message["event"],
                "at": lambda: events.nearest(self._lanes, message["lane"], message["time"]),
                "neighbour": lambda: events.neighbour(self._lanes, message["event"], message["by"]),
            }[kind]()
            details = events.details(self._lanes, event) if event >= 0 else None  # -1: the lane has no event
            self.send(reply | {"kind": "details", "details": details})

    def _search(self, message: dict[str, Any], reply: dict[str, Any]) -> None:
        """Sends the match after the last one, or for a new text the first match that begins in the view or after it."""
        text, by = message["text"], message["by"]
        last_text, matches, position = self._search_state
        if text != last_text:
            matches = events.search(self._lanes, text)
            position = int(np.searchsorted(self._lanes.start[matches], message["time"])) - max(by, 0)
        position = (position + by) % len(matches) if len(matches) else 0
        self._search_state = (text, matches, position)
        marks = self._lanes.start[matches]
        marks = marks[np.linspace(0, len(marks) - 1, min(len(marks), MARKS)).astype(np.int64)].astype(np.float64)
        details = events.details(self._lanes, int(matches[position])) if len(matches) else None
        content = {"kind": "found", "text": text, "count": len(matches), "at": position + 1, "details": details}
        self.send(reply | content, [marks.tobytes()])


def scene_of(lanes: Lanes, tiles: Tiles, first: tuple[int, int]) -> dict[str, Any]:
    """The data that the browser needs before it can request tiles."""
    begin, end = lanes.span
    colors = shade_colors(lanes)
    strips = [
        {
            "trace": strip.trace,
            "process": events.process_name(lanes.traces[strip.trace], strip.process),
            "kind": strip.kind,
            "label": strip.title,
            "thread": strip.label,
            "first": strip.first,
            "lanes": strip.lanes,
        }
        for strip in lanes.strips
    ]
    return {
        "title": f"Timeline of {' and '.join(lanes.names)}, {len(lanes):,} events in {lanes.count} lanes",
        "names": list(lanes.names), "strips": strips, "lanes": lanes.count,
        "events": len(lanes), "leftOut": lanes.left_out,
        "shades": [
            {"name": name, "color": color, "themed": at < len(SHADES)}  # not themed: a range coloured by its own name
            for at, (name, color) in enumerate(zip(lanes.shades, colors, strict=True))
        ],
        "staged": any(has_labels(trace) for trace in lanes.traces), "present": np.unique(lanes.shade).tolist(),
        "origin": begin, "end": end, "exponent": tiles.exponent, "levels": tiles.levels, "columns": COLUMNS,
        "zero": f"0: {lanes.aligned}", "view": list(first), "all": list(view(lanes)),
    }  # fmt: skip


def show_timeline(
    trace: Traces,
    other: Trace | None = None,
    *,
    window: tuple[float, float] | None = None,
    steps: int | range | None = None,
) -> None:
    """Shows a Timeline in a live notebook, and a static figure of the same traces in a batch run."""
    traces = traces_of(trace, other)
    if is_live():
        display(Timeline(traces, window=window, steps=steps))
    else:
        Slot(timeline(traces, window=window, steps=steps))
