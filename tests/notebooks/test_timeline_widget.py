"""The timeline in a real JupyterLab: keys, mouse and search work, and no error is logged.

Further tests: Python's answers without a browser, and the static figure of a batch run.
"""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from helpers.notebooks.browser_lab import needs_browser, write_notebook
from helpers.sweeps import sweep
from helpers.traces.handmade import Recorder
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

from labkit.notebooks.report import PLOTLY_MIME_TYPE
from labkit.nsys.timeline.events import details, search
from labkit.nsys.timeline.lanes import build_lanes
from labkit.nsys.timeline.shades import SHADES
from labkit.nsys.timeline.synthetic import decode_trace
from labkit.nsys.timeline.tiles import COLUMNS
from labkit.nsys.trace import Source, Trace, TraceError
from labkit.widgets.browser import DARK, LIGHT, Lab, jupyterlab
from labkit.widgets.timeline import BUFFERS, HERE, Timeline, traces_of

SOURCE = """from labkit.nsys.timeline.synthetic import decode_trace
from labkit.widgets.timeline import show_timeline
vanilla, fused = decode_trace(steps=6, layers=3, kernels_per_stage=3), decode_trace(steps=6, layers=3)
show_timeline({"vanilla": vanilla, "fused": fused})"""
TRACES = {"vanilla": decode_trace(steps=6, layers=3, kernels_per_stage=3), "fused": decode_trace(steps=6, layers=3)}
VIEW = "document.querySelector('.labkit-timeline').timeline"
PLACE = f"""([time, lane]) => {{
  const {{ painter }} = {VIEW};
  const row = painter.layout.ofLane.get(lane);
  return [painter.x(time), painter.top(row, {VIEW}) + row.height / 2];
}}"""
READY = '.labkit-timeline[data-state="ready"]'


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A notebook in JupyterLab after a run. At the end its page must have logged no errors."""
    folder = tmp_path_factory.mktemp("lab")
    name = write_notebook(folder, SOURCE)
    with jupyterlab(folder) as lab:
        lab.open(name)
        lab.run_all()
        lab.page.wait_for_selector(READY)
        yield lab
        assert lab.errors == []


@pytest.fixture
def page(shown: Lab) -> Any:
    """The page with the whole timeline in view, no selection, and the focus on the timeline."""
    canvas = shown.page.locator(".labkit-timeline canvas")
    shown.page.locator(".lkt-bar input").fill("")
    shown.page.wait_for_function("() => document.querySelector('.lkt-count').innerText === ''")
    canvas.focus()
    shown.page.keyboard.press("Escape")
    shown.page.keyboard.press("0")
    shown.page.evaluate(f"{VIEW}.lane = null")
    shown.page.wait_for_selector(".lkt-empty")
    return shown.page


def span_ns(page: Any) -> float:
    return float(page.evaluate(f"{VIEW}.room * {VIEW}.perPixel"))


def place(page: Any, time: float, lane: int) -> tuple[float, float]:
    """Coordinates on the page of a time in a lane."""
    box = page.locator(".labkit-timeline canvas").bounding_box()
    x, y = page.evaluate(PLACE, [time, lane])
    return box["x"] + x, box["y"] + y


def fact(page: Any, name: str) -> str:
    return str(page.locator(f'.lkt-details [data-fact="{name}"] dd').inner_text())


@sweep
@needs_browser
def test_keys_zoom_and_pan(page: Any) -> None:
    everything = span_ns(page)
    for _ in range(4):
        page.keyboard.press("+")
    assert span_ns(page) == pytest.approx(everything / 1.6**4)
    begin = page.evaluate(f"{VIEW}.begin")
    page.keyboard.press("ArrowRight")
    assert page.evaluate(f"{VIEW}.begin") == pytest.approx(begin + 0.15 * span_ns(page))
    page.keyboard.press("-")
    assert span_ns(page) == pytest.approx(everything / 1.6**3)
    page.wait_for_selector(READY)


@sweep
@needs_browser
def test_the_wheel_zooms_around_the_mouse_once_the_timeline_has_the_focus(page: Any) -> None:
    everything = span_ns(page)
    x, y = place(page, 200_000, 0)
    page.mouse.move(x, y)
    page.locator(".lkt-bar input").focus()
    page.mouse.wheel(0, -300)
    page.wait_for_timeout(100)
    assert span_ns(page) == everything
    page.locator(".labkit-timeline canvas").focus()
    page.mouse.wheel(0, -300)
    page.wait_for_function(f"before => {VIEW}.room * {VIEW}.perPixel < before", arg=everything * 0.9)
    page.wait_for_selector(READY)
    assert place(page, 200_000, 0)[0] == pytest.approx(x, abs=1)


@sweep
@needs_browser
def test_dragging_moves_what_is_under_the_mouse_with_it(page: Any) -> None:
    page.keyboard.press("+")
    page.wait_for_selector(READY)
    x, y = place(page, 150_000, 0)
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x - 60, y, steps=3)
    page.mouse.up()
    page.wait_for_selector(READY)
    assert place(page, 150_000, 0)[0] == pytest.approx(x - 60, abs=1)


@sweep
@needs_browser
@pytest.mark.parametrize("side", TRACES)
def test_a_click_on_a_kernel_tells_its_stage_and_what_launched_it(page: Any, side: str) -> None:
    lanes = build_lanes(TRACES)
    kernels = search(lanes, "decode_attention")
    (event, *_) = (kernel for kernel in kernels if lanes.traces[lanes.source[kernel] // 3] is TRACES[side])
    page.evaluate(
        f"([begin, end]) => {VIEW}.show(begin, end)", [int(lanes.start[event]) - 20_000, int(lanes.end[event]) + 20_000]
    )
    page.wait_for_selector(READY)
    page.mouse.click(*place(page, (lanes.start[event] + lanes.end[event]) / 2, int(lanes.lane[event])))
    page.wait_for_selector(".lkt-details header")
    expected = details(lanes, int(event))
    assert expected["stage"] == "attention"
    assert [fact(page, name) for name in ("stage", "layer", "phase", "trace")] == ["attention", "0", "decode", side]
    assert "decode_attention" in page.locator(".lkt-details code").inner_text()
    parents = page.locator(".lkt-parents button b").all_inner_texts()
    assert parents == ["decode", "decode/step", "decode/layer.0/attention"]
    assert page.locator(".lkt-linked button b").all_inner_texts() == ["cudaLaunchKernel"]


@sweep
@needs_browser
def test_a_parent_is_a_way_to_its_own_details(page: Any) -> None:
    page.locator(".lkt-bar input").fill("layer.1/mlp_out")
    page.wait_for_selector(".lkt-details header")
    page.locator(".lkt-parents button", has_text="decode/step").click()
    page.wait_for_function("() => document.querySelector('.lkt-details code').innerText === 'decode/step'")
    assert fact(page, "stage") == "none"


@sweep
@needs_browser
def test_the_search_counts_and_goes_through_its_matches(page: Any) -> None:
    count = f"{len(search(build_lanes(TRACES), 'layer.1/mlp_out')):,}"
    box = page.locator(".lkt-bar input")
    box.fill("layer.1/MLP_out")
    page.wait_for_function(
        "count => document.querySelector('.lkt-count').innerText.endsWith(` of ${count}`)", arg=count
    )
    first = page.locator(".lkt-count").inner_text()
    box.press("Enter")
    page.wait_for_function("first => document.querySelector('.lkt-count').innerText !== first", arg=first)
    assert fact(page, "stage") == "mlp_out"
    box.fill("no such name")
    page.wait_for_function("() => document.querySelector('.lkt-count').innerText === 'none found'")


@sweep
@needs_browser
def test_without_a_mouse_lanes_are_chosen_and_events_selected(page: Any) -> None:
    for _ in range(3):
        page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_selector(".lkt-details header")
    before = fact(page, "start")
    page.keyboard.press("Shift+ArrowRight")
    page.wait_for_function(
        """before => document.querySelector('.lkt-details [data-fact="start"] dd').innerText !== before""", arg=before
    )
    page.keyboard.press("f")
    page.wait_for_selector(READY)
    duration = page.evaluate(f"{VIEW}.selected.duration_ns")
    assert span_ns(page) == pytest.approx(1.2 * duration, rel=0.01)
    page.keyboard.press("Escape")
    page.wait_for_selector(".lkt-empty")


@sweep
@needs_browser
def test_a_stage_of_the_legend_is_emphasised_and_let_go(page: Any) -> None:
    chip = page.locator(".lkt-legend button", has_text=re.compile("^attention$"))
    chip.click()
    assert chip.get_attribute("aria-pressed") == "true"
    assert page.evaluate(f"[...{VIEW}.emphasised]") == [SHADES.index("attention")]
    chip.click()
    assert chip.get_attribute("aria-pressed") == "false"


@sweep
@needs_browser
def test_it_has_the_colours_of_the_pages_theme(page: Any) -> None:
    paper = "getComputedStyle(document.body).getPropertyValue('--jp-layout-color0').trim()"
    change = "theme => void window.jupyterapp.commands.execute('apputils:change-theme', {{ theme }})"
    assert page.evaluate(f"{VIEW}.inks.paper === {paper}")
    for theme in (DARK, LIGHT):
        before = page.evaluate(f"{VIEW}.inks.paper")
        page.evaluate(change.format(), theme)
        page.wait_for_function(f"before => {VIEW}.inks.paper !== before && {VIEW}.inks.paper === {paper}", arg=before)


def test_python_and_the_browser_agree_on_a_tiles_buffers() -> None:
    types = {"float64": "Float64Array", "int32": "Int32Array", "uint16": "Uint16Array", "uint8": "Uint8Array"}
    match = re.search(r"const BUFFERS = \{(.*?)\};", (HERE / "timeline_tiles.js").read_text(), re.DOTALL)
    assert match
    buffers = re.findall(r"(\w+): (\w+Array)", match[1])
    assert buffers == [(name, types[np.dtype(dtype).name]) for name, dtype in BUFFERS.items()]


def test_nothing_is_loaded_from_elsewhere() -> None:
    for file in HERE.glob("timeline*"):
        if file.suffix in (".js", ".css"):
            assert not re.search(r"https?:|@import|url\(", file.read_text())


@pytest.fixture
def widget(monkeypatch: pytest.MonkeyPatch) -> Timeline:
    """A timeline that records in `sent` the messages it would send to the browser."""
    timeline = Timeline(TRACES)
    timeline.sent = []
    monkeypatch.setattr(timeline, "send", lambda content, buffers=None: timeline.sent.append((content, buffers)))
    return timeline


def test_the_first_view_comes_with_its_tiles(widget: Timeline) -> None:
    begin, end = widget.scene["view"]
    finest = max(tile["level"] for tile in widget.tiles)
    width = COLUMNS << (widget.scene["exponent"] - finest)
    covered = {tile["index"] for tile in widget.tiles if tile["level"] == finest}
    last = (min(end, widget.scene["end"]) - widget.scene["origin"]) // width
    assert covered == set(range(last + 1))
    assert (end - begin) / 1400 / 2 <= width / COLUMNS <= (end - begin) / 1400


def test_a_tile_is_sent_with_every_buffer(widget: Timeline) -> None:
    widget._answer(widget, {"kind": "tiles", "tiles": [[1, 0], [2, 1]]}, [])
    assert [(content["level"], content["index"]) for content, _ in widget.sent] == [(1, 0), (2, 1)]
    for _, buffers in widget.sent:
        columns = {name: np.frombuffer(raw, dtype) for raw, (name, dtype) in zip(buffers, BUFFERS.items(), strict=True)}
        events = {len(columns[name]) for name in ("start", "end", "event", "lane", "shade", "name")}
        assert len(events) == 1
        assert len(columns["columnFill"]) == len(columns["columnShade"]) == len(columns["rows"]) * COLUMNS


def test_the_search_goes_round(widget: Timeline) -> None:
    request = {"kind": "search", "text": "lm_head", "time": -1e9, "view": "v"}
    for step in (0, 1, -1, -1):
        widget._answer(widget, request | {"by": step}, [])
    answers = [content for content, _ in widget.sent]
    count = answers[0]["count"]
    assert [content["at"] for content in answers] == [1, 2, 1, count]
    assert {content["view"] for content in answers} == {"v"}
    assert len({content["details"]["event"] for content in answers}) == 3


def test_a_message_that_is_not_known_is_let_pass(widget: Timeline) -> None:
    widget._answer(widget, {"kind": "what"}, [])
    assert widget.sent == []


def test_names_of_a_mapping_stay_when_another_trace_is_added() -> None:
    other = decode_trace(steps=1)
    (name,) = traces_of(other, None)
    traces = traces_of({**TRACES, name: other}, other)
    assert list(traces) == [*TRACES, name, f"{name} (2)"]
    assert traces["fused"] is TRACES["fused"]


def test_only_shades_of_the_theme_are_looked_up_in_it() -> None:
    recorder = Recorder()
    recorder.range("lane", 0, 50, domain="")
    shades = Timeline(recorder.trace()).scene["shades"]
    assert [shade["name"] for shade in shades if shade["themed"]] == list(SHADES)
    assert [shade["name"] for shade in shades if not shade["themed"]] == ["lane"]


def test_a_trace_of_nothing_is_refused() -> None:
    with pytest.raises(TraceError, match="without ranges, calls or GPU operations"):
        Timeline(Trace(Source("nsys", "", ("empty.sqlite",))))


@sweep
def test_in_batch_it_is_a_figure() -> None:
    """As in the report of the third notebook, run in a kernel of its own."""
    notebook = new_notebook(cells=[new_code_cell(SOURCE)])
    NotebookClient(notebook, kernel_name="python3", timeout=120).execute()
    (output,) = notebook.cells[0].outputs
    assert PLOTLY_MIME_TYPE in output["data"]
    assert not any("widget" in kind for kind in output["data"])
