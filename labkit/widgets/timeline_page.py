"""A timeline as a page that works without a network and without Python: the widget with all its events."""

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
from labkit.system.home import expanded
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
<div id="timeline">The timeline is being unpacked; this needs scripts.</div></main>
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
    """The page of one trace, or of several below each other on one axis, each from its own zero.

    - selection: the events on the page.
    - lane: a regular expression that the threads and streams on the page match.
    - steps: decode steps on which the page opens; by default it opens on all events.

    Names are shown as text, never as markup. TraceError if no event is left.
    """
    lanes = narrowed(build_lanes(traces), selection, lane)
    first = view(lanes, None, steps) if steps is not None or selection.window_ns is None else _within(lanes, selection)
    scene = scene_of(lanes, Tiles(lanes), first)
    header, planes = pack(lanes)
    facts = json.dumps({"scene": scene, **header}, separators=(",", ":"))
    lines = [
        f"{name}: {line}" for name, trace in zip(lanes.names, lanes.traces, strict=True) for line in _omitted(trace)
    ]
    about = "".join(f'<p class="about">{html.escape(line)}</p>' for line in lines)
    return PAGE.format(
        policy=POLICY,
        title=html.escape(f"Timeline: {' above '.join(lanes.names)}"),
        style=stylesheet() + (HERE / "timeline.css").read_text(encoding="utf-8") + STYLE,
        about=about,
        packed=packed_element(facts.encode() + b"\n" + planes),
        script=unpack_script() + script(PAGE_PARTS),
    )


def write_timeline_page(traces: Traces, path: str | os.PathLike[str], **options: Any) -> Path:
    """Writes `timeline_page(traces, **options)` to a file, whole or not at all, and returns its path."""
    target = expanded(path)
    write_whole(target, timeline_page(traces, **options))
    return target


def _within(lanes: Lanes, selection: Selection) -> tuple[int, int]:
    """Begin and end of a view for the window on the first trace's clock, limited to the events."""
    begin, end = lanes.span
    opens, closes = (time - lanes.zeros_ns[0] for time in selection.window_ns or (begin, end))
    return max(opens, begin), min(closes, end)


def _omitted(trace: Trace) -> Iterator[str]:
    """Lines about the parts of a trace that the page does not show."""
    yield from (f"skipped: {line}" for line in trace.source.skipped)
    if trace.source.unread:
        yield f"not read: {', '.join(trace.source.unread)}"
