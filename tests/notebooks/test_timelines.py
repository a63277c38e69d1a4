"""The third notebook: under papermill, run by `labkit run`, and live in a real JupyterLab."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest
from helpers.notebooks.browser_lab import needs_browser
from helpers.notebooks.notebook_cases import CASES

from labkit.notebooks import RunReport
from labkit.widgets.browser import Lab, jupyterlab

NOTEBOOK, FIGURES = CASES["03"].path, CASES["03"].figures
READY = '.labkit-timeline[data-state="ready"]'
VIEW = "document.querySelector('.labkit-timeline').timeline"


@pytest.mark.sweep
def test_the_page_names_the_model_of_the_bundled_captures(report_of: Callable[[str], RunReport]) -> None:
    html = report_of("03").html.read_text()
    assert "model <b>gpt2</b>" in html
    assert "smollm2" not in html.partition('<details class="code">')[0]


@pytest.mark.sweep
def test_plain_papermill_captures_both_sides_itself(tmp_path: Path) -> None:
    values = {"model": "tiny-gpt2", "steps": 6, "threads": 1, "source": "torch"}
    parameters = [part for name, value in values.items() for part in ("-p", name, str(value))]
    command = [sys.executable, "-m", "papermill", str(NOTEBOOK), "out.ipynb", *parameters]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert process.returncode == 0, process.stderr
    kept = {file.name.partition(".")[0] for file in (tmp_path / "runs").iterdir()}
    assert kept == {"tiny-gpt2-hf-eager", "tiny-gpt2-fused"}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("lab")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace('source: str = "auto"', 'source: str = "bundled"')
    nbformat.write(notebook, folder / "timelines.ipynb")
    with jupyterlab(folder) as lab:
        lab.open("timelines.ipynb")
        lab.run_all()
        assert lab.page.locator(".js-plotly-plot").count() == 0  # nothing runs before Run is pressed
        lab.page.locator("button", has=lab.page.locator(".fa-play")).first.click()
        lab.page.wait_for_selector(READY)
        yield lab
        assert lab.errors == []


@needs_browser
@pytest.mark.sweep
def test_in_jupyterlab_all_cells_run_and_a_click_tells_the_stage(lab: Lab) -> None:
    page = lab.page
    assert page.locator(".js-plotly-plot").count() == FIGURES - 1  # the timelines are live
    page.locator(".labkit-timeline canvas").focus()
    before = page.evaluate(f"{VIEW}.perPixel")
    page.keyboard.press("+")
    assert page.evaluate(f"{VIEW}.perPixel") < before
    page.locator(".lkt-bar input").fill("decode/layer.3/mlp")
    page.wait_for_selector(".lkt-details header")
    fact = '.lkt-details [data-fact="{}"] dd'
    assert page.locator(fact.format("stage")).inner_text() == "mlp"
    assert page.locator(fact.format("layer")).inner_text() == "3"
    assert "decode/step" in page.locator(".lkt-parents").inner_text()


HEIGHTS = """() => [...document.querySelectorAll(".js-plotly-plot")].map((plot) =>
  Math.round(plot.querySelector(".svg-container").getBoundingClientRect().height))"""
WIDTH = "() => document.querySelector('.js-plotly-plot').getBoundingClientRect().width"


@needs_browser
@pytest.mark.sweep
def test_figures_follow_the_windows_width_and_keep_their_height(lab: Lab) -> None:
    page = lab.page
    page.wait_for_function(f"({HEIGHTS})().length === {FIGURES - 1}")
    heights, width = page.evaluate(HEIGHTS), page.evaluate(WIDTH)
    assert min(heights) > 200
    page.set_viewport_size({"width": 1280, "height": 700})
    page.wait_for_timeout(500)
    assert page.evaluate(HEIGHTS) == heights
    page.set_viewport_size({"width": 1000, "height": 700})
    page.wait_for_function(f"before => ({WIDTH})() < before - 200", arg=width)
    page.wait_for_timeout(500)
    assert page.evaluate(HEIGHTS) == heights
