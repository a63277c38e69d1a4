"""`make bench`, the part about timelines: opens and pans a timeline of a million events in JupyterLab and as a page.

python -P -m labkit.bench.timeline [--events N]

It needs playwright and Chromium, as the tests do; labkit itself does not need them. Without them it does nothing.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import nbformat
import typer

from labkit.bench.bars import SECONDS, BarUnit, at_least, at_most
from labkit.bench.page import err, out, print_checks
from labkit.bench.targets import PAGE_MB, TIMELINE_FRAMES, TIMELINE_OPEN_S
from labkit.nsys.timeline.synthetic import trace_of
from labkit.system.command import run_command
from labkit.widgets.browser import Lab, jupyterlab, missing, opened_page
from labkit.widgets.timeline_page import write_timeline_page

FRAMES = BarUnit("{:.0f} frames a second", "{:g}")
MEGABYTES = BarUnit("{:.1f} MB", "{:g}")
OPENINGS = 5
PAN_S = 2.0
ZOOMS = (0, 4, 8, 12, 15, 18, 21)  # presses of "+", starting from all events
MAKE = """from labkit.nsys.timeline.synthetic import trace_of
from labkit.widgets.timeline import Timeline
import time
trace = trace_of({events})"""
SHOW = "print(time.time())\nTimeline(trace)"
# Records the page's frames until `on` is false: the time of each, and how often the timeline had drawn by then.
WATCH = """() => {{
  const seen = (window.labkitSeen = {{ on: true, frames: [] }});
  const note = (now) => {{
    seen.frames.push([now, {view}.frames]);
    if (seen.on) requestAnimationFrame(note);
  }};
  requestAnimationFrame(note);
}}"""
SHOWN = """() => {{
  const view = {view};
  return [view.painter.shown.reduce((sum, {{ tile }}) => sum + tile.start.length, 0), view.room * view.perPixel];
}}"""
VIEW = "document.querySelectorAll('.labkit-timeline')[{at}]?.timeline"


@dataclass(frozen=True)
class Pan:
    """Measurements while the mouse dragged the timeline to and fro."""

    span_ms: float
    events: int  # drawn one by one, in the visible tiles
    frames_per_s: float
    longest_ms: float  # between two frames of the page


def main(events: Annotated[int, typer.Option(min=1000, help="Events of the trace.")] = 1_000_000) -> None:
    """Open and pan a timeline in Chromium. Prints a note if Chromium is not installed."""
    if reason := missing():
        err.print(f"note: the timeline was not measured: {reason}", style="yellow", soft_wrap=True)
        return
    opened_s, pans = measure(events)
    in_notebook = _summary(f"{events:,} events, from the call to the first complete picture", opened_s, pans)
    opened_s, pans, sizes = measure_page(events)
    as_page = _summary(f"{events:,} events on a page, from its start to the first complete picture", opened_s, pans)
    print_checks(
        [
            at_most("open in a notebook", in_notebook[0], TIMELINE_OPEN_S, SECONDS),
            at_least("pan in a notebook", in_notebook[1], TIMELINE_FRAMES, FRAMES),
            at_most("open a page", as_page[0], TIMELINE_OPEN_S, SECONDS),
            at_least("pan a page", as_page[1], TIMELINE_FRAMES, FRAMES),
            *(
                at_most(f"page of {count:,} events", size / 1e6, PAGE_MB[count], MEGABYTES)
                for count, size in sizes.items()
                if count in PAGE_MB
            ),
        ]
    )


def _summary(title: str, opened_s: list[float], pans: list[Pan]) -> tuple[float, float]:
    """Prints the measurements; returns the median of the openings and the least frames per second."""
    median = statistics.median(opened_s)
    seconds = ", ".join(f"{second:.2f}" for second in opened_s)
    out.print(f"{title}: {median:.2f} s ({seconds})", soft_wrap=True)
    for pan in pans:
        out.print(
            f"  panning {pan.span_ms:,.2f} ms, {pan.events:,} events singly: {pan.frames_per_s:.0f} frames a second, "
            f"at most {pan.longest_ms:.0f} ms between two",
            soft_wrap=True,
        )
    return median, min(pan.frames_per_s for pan in pans)


def measure(events: int, openings: int = OPENINGS) -> tuple[list[float], list[Pan]]:
    """Seconds of each opening, and the pans of the last one at several zooms."""
    with tempfile.TemporaryDirectory(prefix="labkit-timeline-") as folder:
        cells = [nbformat.v4.new_code_cell(source) for source in (MAKE.format(events=events), *[SHOW] * openings)]
        nbformat.write(nbformat.v4.new_notebook(cells=cells), Path(folder) / "timeline.ipynb")
        with jupyterlab(Path(folder)) as lab:
            lab.open("timeline.ipynb")
            lab.run_next()
            opened_s = [_open(lab, index) for index in range(openings)]
            return opened_s, [_pan(lab.page, openings - 1, zoom) for zoom in ZOOMS]


def measure_page(events: int, openings: int = OPENINGS) -> tuple[list[float], list[Pan], dict[int, int]]:
    """Like `measure`, for a page, and the bytes of pages with `events` events and with a tenth of them."""
    with tempfile.TemporaryDirectory(prefix="labkit-timeline-") as folder:
        pages = {
            count: write_timeline_page(trace_of(count), Path(folder) / f"{count}.html")
            for count in (events // 10, events)
        }
        sizes = {count: path.stat().st_size for count, path in pages.items()}
        with opened_page() as (page, _):
            opened_s = []
            for _ in range(openings):
                page.goto(pages[events].as_uri())
                page.wait_for_function(f"() => {VIEW.format(at=0)}?.readyAt")
                opened_s.append(page.evaluate(f"{VIEW.format(at=0)}.readyAt - performance.timeOrigin") / 1e3)
            return opened_s, [_pan(page, 0, zoom) for zoom in ZOOMS], sizes


def _open(lab: Lab, at: int) -> float:
    """Seconds from the call of Timeline in the kernel to the first frame with every tile in the browser.

    Both read the clock of the machine.
    """
    lab.run_next()
    lab.page.wait_for_function(f"() => {VIEW.format(at=at)}.readyAt")
    called_s = float(lab.page.locator(".jp-OutputArea-output pre").nth(at).inner_text())
    return float(lab.page.evaluate(f"{VIEW.format(at=at)}.readyAt")) / 1e3 - called_s


def _pan(page: Any, at: int, zoom: int) -> Pan:
    view = VIEW.format(at=at)
    canvas = page.locator(".labkit-timeline canvas").nth(at)
    canvas.focus()
    page.keyboard.press("0")
    for _ in range(zoom):
        page.keyboard.press("+")
    page.wait_for_timeout(500)
    box = canvas.bounding_box()
    left, right, y = box["x"] + 240, box["x"] + box["width"] - 40, box["y"] + 100
    page.evaluate(WATCH.format(view=view))
    page.mouse.move(x := right, y)
    page.mouse.down()
    towards, until = -14.0, time.monotonic() + PAN_S
    while time.monotonic() < until:
        towards = -towards if not left < x + towards < right else towards
        page.mouse.move(x := x + towards, y)
    page.mouse.up()
    seen: list[tuple[float, int]] = page.evaluate("(window.labkitSeen.on = false, window.labkitSeen.frames)")
    gaps = [after[0] - before[0] for before, after in pairwise(seen)]
    drawn = seen[-1][1] - seen[0][1]
    events, span_ns = page.evaluate(SHOWN.format(view=view))
    return Pan(span_ns / 1e6, events, drawn / (seen[-1][0] - seen[0][0]) * 1e3, max(gaps))


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
