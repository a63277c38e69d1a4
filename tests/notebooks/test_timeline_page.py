"""The page of a timeline agrees with Python in a real browser and loads nothing; some tests need no browser."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.notebooks.browser_lab import needs_browser
from helpers.notebooks.pages import MOST_BYTES, Page
from helpers.traces.handmade import Recorder
from helpers.traces.random_traces import random_trace

from labkit.figures.timeline import shade_colors
from labkit.nsys.tables.selection import Selection
from labkit.nsys.timeline.events import details, nearest, neighbour, search
from labkit.nsys.timeline.lanes import Lanes, Traces, build_lanes
from labkit.nsys.timeline.shades import SHADES
from labkit.nsys.timeline.synthetic import decode_trace, trace_of
from labkit.nsys.timeline.tiles import Tiles
from labkit.nsys.trace import Trace, TraceError
from labkit.widgets.browser import opened_page
from labkit.widgets.timeline_page import timeline_page, write_timeline_page

VIEW = "document.querySelector('.labkit-timeline').timeline"
DRAWN = f"() => document.querySelector('.labkit-timeline') && {VIEW}.readyAt"
TILE = f"""([level, index]) => new Promise((resolve) => {{
  const {{ model }} = {VIEW}, receive = model.receive;
  model.receive = ({{ tile }}) => {{
    model.receive = receive;
    const list = (name) => [...tile[name]];
    resolve(["event", "start", "end", "lane", "shade", "rows", "columnShade", "columnFill"].map(list));
  }};
  model.answer({{ kind: "tiles", tiles: [[level, index]] }});
}})"""
HOSTILE = '</script><script>document.title = "broken"</script><b>mine'


def with_hostile_names() -> Trace:
    recorder = Recorder()
    recorder.range(HOSTILE, 0, 100, domain="<i>")
    recorder.kernel(10, 20, 30, name=HOSTILE)
    return recorder.trace()


TRACES: dict[str, Traces] = {
    "random": random_trace(2),
    "decode": {"vanilla": decode_trace(steps=3, layers=2, kernels_per_stage=3), "fused": decode_trace(steps=3)},
    "hostile": with_hostile_names(),
}


@pytest.fixture(scope="module")
def shared_browser() -> Iterator[Any]:
    with opened_page() as (page, errors):
        yield page
        assert errors == []


@pytest.fixture
def browser(shared_browser: Any) -> Any:
    """The shared browser, with its window reset to a fixed size."""
    shared_browser.set_viewport_size({"width": 1000, "height": 700})
    return shared_browser


def opened(browser: Any, folder: Path, name: str) -> Lanes:
    browser.goto(write_timeline_page(TRACES[name], folder / "timeline.html").as_uri())
    browser.wait_for_function(DRAWN)
    return build_lanes(TRACES[name])


@needs_browser
@pytest.mark.parametrize("name", TRACES)
def test_tiles_and_details_are_those_of_python(browser: Any, tmp_path: Path, name: str) -> None:
    lanes = opened(browser, tmp_path, name)
    tiles = Tiles(lanes)
    for level in (0, 1, tiles.exponent // 2):
        for index in range(0, 1 << level, max((1 << level) // 5, 1)):
            tile = tiles.tile(level, index)
            events = tile.events
            expected: list[np.ndarray] = [
                events, lanes.start[events], lanes.end[events], lanes.lane[events], lanes.shade[events], tile.lanes,
                tile.shade[tile.fill > 0], tile.fill,
            ]  # fmt: skip
            *columns, shade, fill = browser.evaluate(TILE, [level, index])
            shade = np.array(shade)[np.array(fill) > 0]  # the shade of an empty column is arbitrary
            for of_python, of_browser in zip(expected, (*columns, shade, fill), strict=True):
                assert np.array_equal(of_python.ravel(), of_browser)
    for event in range(0, len(lanes), max(len(lanes) // 40, 1)):
        browser_details = browser.evaluate(f"(event) => {VIEW}.model.events.details(event)", event)
        python_details = details(lanes, event)
        python_details["facts"].pop("correlation", None)
        assert browser_details == json.loads(json.dumps(python_details))


@needs_browser
def test_places_neighbours_and_names_are_found(browser: Any, tmp_path: Path) -> None:
    lanes = opened(browser, tmp_path, "decode")
    begin, end = lanes.span
    for lane in range(lanes.count):
        for time in np.linspace(begin, end, 7).astype(int).tolist():
            script = f"([lane, time]) => {VIEW}.model.events.nearest(lane, time)"
            assert browser.evaluate(script, [lane, time]) == nearest(lanes, lane, time)
    for event, step in ((0, 1), (5, -2), (len(lanes) - 1, 1)):
        script = f"([event, by]) => {VIEW}.model.events.neighbour(event, by)"
        assert browser.evaluate(script, [event, step]) == neighbour(lanes, event, step)
    script = f"(text) => {VIEW}.model.events.search(text)"
    assert browser.evaluate(script, "GEMV") == search(lanes, "gemv").tolist()
    browser.locator(".lkt-bar input").fill("gemv")
    browser.wait_for_function("() => /^[0-9]+ of [0-9]+$/.test(document.querySelector('.lkt-count').innerText)")
    assert "gemv" in browser.locator(".lkt-details code").inner_text()


@needs_browser
def test_names_are_text_whatever_is_in_them(browser: Any, tmp_path: Path) -> None:
    lanes = opened(browser, tmp_path, "hostile")
    browser.evaluate(f"() => {VIEW}.model.send({{ kind: 'details', event: 0, view: {VIEW}.token }})")
    browser.wait_for_selector(".lkt-details code")
    assert browser.locator(".lkt-details code").inner_text() == HOSTILE
    assert browser.title() == "Timeline: made.sqlite"
    assert HOSTILE in lanes.shades


@needs_browser
def test_a_range_has_its_own_colour_and_a_moment_is_revealed_without_a_zoom(browser: Any, tmp_path: Path) -> None:
    recorder = Recorder()
    for number, name in enumerate(("lane", "band", "step", "moment")):
        recorder.range(name, 100 * number, 100 * number + 50 * (name != "moment"), domain="")
    trace = recorder.trace()
    browser.goto(write_timeline_page(trace, tmp_path / "timeline.html").as_uri())
    browser.wait_for_function(DRAWN)
    own = len(SHADES)
    assert browser.evaluate(f"{VIEW}.inks.shades.slice({own})") == shade_colors(build_lanes(trace))[own:]
    assert browser.evaluate(f"{VIEW}.inks.rgb.flat().every(Number.isFinite)")
    before = browser.evaluate(f"{VIEW}.perPixel")
    browser.fill(".lkt-bar input", "moment")
    browser.wait_for_selector(".lkt-details code")
    assert browser.evaluate(f"{VIEW}.perPixel") == before


@needs_browser
@pytest.mark.parametrize("width", [400, 1400])
def test_a_page_fits_its_window_in_the_light_in_the_dark_and_on_paper(browser: Any, tmp_path: Path, width: int) -> None:
    opened(browser, tmp_path, "decode")
    browser.set_viewport_size({"width": width, "height": 700})
    papers = []
    for theme in ("light", "dark"):
        browser.emulate_media(color_scheme=theme)
        browser.wait_for_timeout(100)
        assert not browser.evaluate("() => document.documentElement.scrollWidth > innerWidth")
        papers.append(browser.evaluate(f"() => {VIEW}.inks.paper"))
    browser.evaluate("() => dispatchEvent(new Event('beforeprint'))")
    papers.append(browser.evaluate(f"() => {VIEW}.inks.paper"))
    assert papers[0] == papers[2] != papers[1]
    browser.emulate_media(color_scheme="light")


def test_a_page_loads_nothing_and_is_small() -> None:
    html = timeline_page(trace_of(100_000))
    assert len(html) < MOST_BYTES
    page = Page(html)
    assert page.outside == []
    assert "default-src 'none'" in page.policy


def test_a_page_holds_the_part_that_was_asked_for() -> None:
    trace = decode_trace(steps=4, layers=2)
    end = int(trace.ranges["end_ns"].max())
    part = timeline_page(trace, selection=Selection(window_ns=(0, end // 2)), lane="gpu")
    assert len(part) < len(timeline_page(trace))
    with pytest.raises(
        TraceError, match=r"got the lane 'nowhere', which none of the \d+ threads and streams matches: .*GPU"
    ):
        timeline_page(trace, lane="nowhere")
    with pytest.raises(TraceError, match="got the window"):
        timeline_page(trace, selection=Selection(window_ns=(end + 1, end + 2)))


def numbered_trace() -> Trace:
    """Ranges with names as of torch.autograd.profiler.emit_nvtx, an hour after the start of the capture."""
    recorder = Recorder()
    for number in range(640):
        recorder.range(
            f"step {'abc'[number % 3]}, op_id = {number}", 3.6e9 + 10 * number, 3.6e9 + 10 * number + 9, domain=""
        )
    return recorder.trace()


@needs_browser
def test_what_people_do_on_a_page(browser: Any, tmp_path: Path) -> None:
    """Keys work wherever the focus is, and a search begins with the first match in view.

    Ticks are short, and events that are not emphasised have no bright text.
    """
    browser.goto(write_timeline_page({"model-1.5B.v2": numbered_trace()}, tmp_path / "timeline.html").as_uri())
    browser.wait_for_function(DRAWN)
    legend = browser.eval_on_selector_all(".lkt-legend button span", "all => all.map((span) => span.textContent)")
    assert sorted(legend) == ["step a", "step b", "step c"]
    browser.fill(".lkt-bar input", "step")
    browser.wait_for_function("() => document.querySelector('.lkt-count').textContent === '1 of 640'")
    browser.evaluate(f"document.activeElement.blur(); {VIEW}.select(null)")
    for _ in range(12):
        browser.keyboard.press("+")
    begin, per_pixel = browser.evaluate(f"[{VIEW}.begin, {VIEW}.perPixel]")
    assert per_pixel < 10
    ticks = browser.evaluate(f"{VIEW}.painter.ticks({VIEW}).map(({{ text }}) => text)")
    assert len(set(ticks)) == len(ticks) > 3
    assert all(len(text.partition(".")[2]) <= len("123 ms") for text in ticks)
    styles = browser.evaluate(f"""() => {{
      const view = {VIEW}, context = view.painter.context, styles = new Set(), write = context.fillText;
      view.emphasised.add(0); // a shade of none of these ranges
      context.fillText = (text) => text.startsWith("step") && styles.add(context.fillStyle);
      view.draw();
      context.fillText = write;
      view.emphasised.clear();
      return [[...styles], view.inks.soft];
    }}""")
    assert styles == [[styles[1]], styles[1]]
    browser.set_viewport_size({"width": 110, "height": 500})
    browser.wait_for_function(f"() => {VIEW}.painter.width < 110")
    browser.set_viewport_size({"width": 1000, "height": 700})
    browser.wait_for_function(f"() => {VIEW}.painter.width > 900")
    assert browser.evaluate(f"[{VIEW}.begin, {VIEW}.perPixel]") == pytest.approx([begin, per_pixel], rel=1e-4)
