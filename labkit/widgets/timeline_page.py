"""A timeline as a page that opens without a network and without Python: the widget itself, with all of its events."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from labkit.figures.page import POLICY, packed_element, stylesheet, unpack_script
from labkit.nsys.tables.selection import EVERYTHING, Selection
from labkit.nsys.timeline.lanes import Lanes, Traces, build_lanes
from labkit.nsys.timeline.narrowing import narrowed
from labkit.nsys.timeline.packing import pack
from labkit.nsys.timeline.tiles import Tiles
from labkit.nsys.timeline.view import view
from labkit.nsys.trace import Trace
from labkit.system.whole_file import write_whole
from labkit.widgets.timeline import HERE, WIDGET, scene_of, script

PAGE_PARTS = (*WIDGET, "timeline_events.js", "timeline_cut.js", "timeline_page.js")
STYLE = """
main { max-width: none; padding: 10px 16px 24px; }
h1 { font-size: 1.05rem; font-weight: 600; margin: 0 0 4px; overflow-wrap: anywhere; }
.about { color: var(--soft); font-size: 0.82rem; margin: 0 0 6px; overflow-wrap: anywhere; }
body[data-jp-theme-light="false"] { --jp-layout-color0: #16191d; --jp-ui-font-color0: #e4e8ed; }
body[data-jp-theme-light="false"] { --jp-ui-font-color2: #a3aebb; }
@media print { .lkt-swatch { print-color-adjust: exact; } .lkt-bar, .lkt-help, .lkt-tip { display: none; } }
"""
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main><h1>{title}</h1>{about}
<div id="timeline">The timeline is being unpacked; without scripts it stays so.</div></main>
{packed}
<script type="module">
{script}
</script>
</body>
</html>
"""


def timeline_page(
    traces: Traces,
    *,
    selection: Selection = EVERYTHING,
    lane: str | None = None,
    steps: int | range | None = None,
) -> str:
    """The page of one trace, or of several under each other on one axis, each from its own zero.

    It holds every event that `selection` asks about on the threads and streams that match `lane`, a regular expression,
    and opens on all of them or on some decode `steps`. Names are text, whatever is in them. TraceError where nothing is
    left.
    """
    lanes = narrowed(build_lanes(traces), selection, lane)
    first = view(lanes, None, steps) if steps is not None or selection.window_ns is None else _within(lanes, selection)
    scene = scene_of(lanes, Tiles(lanes), first)
    header, planes = pack(lanes)
    told = json.dumps({"scene": scene, **header}, separators=(",", ":"))
    lines = [f"{name}: {line}" for name, trace in zip(lanes.names, lanes.traces, strict=True) for line in _left(trace)]
    about = "".join(f'<p class="about">{html.escape(line)}</p>' for line in lines)
    return PAGE.format(
        policy=POLICY,
        title=html.escape(f"Timeline: {' above '.join(lanes.names)}"),
        style=stylesheet() + (HERE / "timeline.css").read_text(encoding="utf-8") + STYLE,
        about=about,
        packed=packed_element(told.encode() + b"\n" + planes),
        script=unpack_script() + script(PAGE_PARTS),
    )


def write_timeline_page(traces: Traces, path: str | os.PathLike[str], **options: Any) -> Path:
    """Write `timeline_page(traces, **options)` as a file, whole or not at all; returns its path."""
    write_whole(Path(path), timeline_page(traces, **options))
    return Path(path)


def _within(lanes: Lanes, selection: Selection) -> tuple[int, int]:
    """The window on the first trace's clock as begin and end of a view, which goes no further than the events."""
    begin, end = lanes.span
    opens, closes = (time - lanes.zeros_ns[0] for time in selection.window_ns or (begin, end))
    return max(opens, begin), min(closes, end)


def _left(trace: Trace) -> Iterator[str]:
    """What a trace does not show."""
    yield from (f"skipped: {line}" for line in trace.source.skipped)
    if trace.source.unread:
        yield f"not read: {', '.join(trace.source.unread)}"
