"""A live notebook in a real JupyterLab: its figures show the latest run.

The page is loaded again, closed during a run, and opened on a new server.
"""

from pathlib import Path
from typing import Any

import pytest
from helpers.notebooks.browser_lab import needs_browser, write_notebook
from helpers.notebooks.notebook_runs import FAKE

from labkit.widgets.browser import DARK, Lab, jupyterlab

WAITS = """
import time
def compare(*, progress, show, **settings):
    progress(1, 2, "half")
    while open("hold").read():
        time.sleep(0.05)
    return comparison(dtype=settings["dtype"])
widgets.Workbench.study = staticmethod(compare)
"""
CELLS = (FAKE + WAITS, "bench", "bench.run()", "bench.view(figures.per_token_figure)")
SHOWS = """(dtype) => {
  const plot = document.querySelector(".js-plotly-plot");
  return plot && plot.layout.title.subtitle.text.includes(dtype);
}"""


SAVED = """async () => {
  const { context } = window.jupyterapp.shell.currentWidget;
  const model = await window.jupyterapp.serviceManager.contents.get(context.path);
  return JSON.stringify(model.content.metadata.widgets ?? "").includes("float16") && !context.model.dirty;
}"""
WRITTEN = "() => !window.jupyterapp.shell.currentWidget.context.model.dirty"
NOTICE = """() => getComputedStyle(document.querySelector(".labkit-box"), "::before").content"""
INK = "getComputedStyle(document.querySelector('.ytick text')).fill"
PAPER = "'rgb(31, 41, 51)'"  # text colour of a light page


def no_errors(lab: Lab) -> bool:
    """Ignores anywidget's limit of two seconds, which a busy machine may exceed."""
    return [error for error in lab.errors if "Failed to initialize" not in error] == []


def press(lab: Lab, label: str) -> None:
    lab.page.locator(".jupyter-button", has_text=label).first.click()


def wait_for(page: Any, dtype: str) -> None:
    page.wait_for_function(SHOWS, arg=dtype)


@needs_browser
@pytest.mark.sweep
@pytest.mark.timeout(900)
def test_figures_follow_the_runs_whatever_became_of_the_page(tmp_path: Path) -> None:
    folder, home = tmp_path / "work", tmp_path / "home"
    for path in (folder, home):
        path.mkdir()
    hold, name = folder / "hold", write_notebook(folder, *CELLS)
    hold.write_text("")
    with jupyterlab(folder, home=home) as lab:
        page = lab.page
        lab.open(name)
        lab.run_all()
        press(lab, "Run")
        wait_for(page, "float32")
        page.reload()
        lab.wait_idle()
        wait_for(page, "float32")
        page.locator("select:has(option[value=bfloat16])").first.select_option("bfloat16")
        press(lab, "Run")
        wait_for(page, "bfloat16")
        hold.write_text("until the page is gone")
        page.locator("select:has(option[value=bfloat16])").first.select_option("float16")
        press(lab, "Run")
        page.wait_for_function("() => document.body.innerText.includes('This is being measured')")
        page.goto("about:blank")
        hold.write_text("")
        page.goto(f"{lab.url}/lab/tree/{name}")
        wait_for(page, "float16")
        page.wait_for_function(SAVED)
        assert no_errors(lab)
    with jupyterlab(folder, home=home, theme=DARK) as lab:
        lab.open(name)
        wait_for(lab.page, "float16")
        assert "Error displaying widget" not in lab.page.inner_text("body")
        assert "To measure, run its cells again" in lab.page.evaluate(NOTICE)
        assert lab.page.evaluate(INK) != lab.page.evaluate(PAPER)
        lab.run_all()
        lab.page.wait_for_function(WRITTEN)
        lab.page.goto("about:blank")
        lab.page.goto(f"{lab.url}/lab/tree/{name}")
        lab.wait_idle()
        press(lab, "Show last")
        wait_for(lab.page, "float16")
        lab.page.wait_for_function("() => document.body.innerText.includes('Run measures again')")
        assert "Error displaying widget" not in lab.page.inner_text("body")
        assert no_errors(lab)
