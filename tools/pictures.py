"""Takes the pictures of docs/pictures/ again, after `make docs`: .venv/bin/python -P tools/pictures.py

It needs playwright, as the tests do, and Chromium. A figure of each notebook is taken from the page that `make docs`
made of it. The timeline and two live notebooks are taken in JupyterLab, the notebooks after Run was pressed.
"""

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat

from labkit.widgets.browser import Lab, jupyterlab, opened_page

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
PAGES = ROOT / "build" / "pages" / "notebooks"
FIGURES = {  # by notebook, the position on its page of the figure that is taken
    "01_vanilla_vs_fused": 0,
    "02_kernel_by_kernel": 6,
    "03_timelines": 2,
    "04_tensor_parallel": 0,
    "05_precision": 0,
    "06_larger_than_memory": 0,
    "07_pipeline": 0,
    "08_experts": 2,
}
# By notebook, the heading from which on it is taken.
LIVE = {"01_vanilla_vs_fused": "What is measured", "02_kernel_by_kernel": "One after another"}
WIDTH, HEIGHT = 1200, 900
MEASURED_S = 600  # limit for a run of a live notebook
MOST_BYTES = 150_000  # of a picture
TIMELINE = """from labkit.nsys import read
from labkit.widgets import show_timeline
captures = {name: f"profiles/captures/gpt2-{name}.sqlite" for name in ("hf-eager", "fused")}
show_timeline({name: read(file) for name, file in captures.items()}, steps=2)"""


def main() -> None:
    if missing := [name for name in FIGURES if not (PAGES / f"{name}.html").exists()]:
        sys.exit(f"got no page of {', '.join(missing)} in {PAGES}; make docs writes them")
    with tempfile.TemporaryDirectory(prefix="labkit-pictures-") as name:
        taken = Path(name, "taken")
        taken.mkdir()
        take_figures(taken)
        take_live(taken, Path(name, "lab"))
        if large := [file.name for file in taken.iterdir() if file.stat().st_size > MOST_BYTES]:
            sys.exit(f"got {', '.join(large)} with more than {MOST_BYTES:,} bytes; show less in them")
        shutil.copytree(taken, PICTURES, dirs_exist_ok=True)


def take_figures(taken: Path) -> None:
    """Takes a figure of each notebook from its page."""
    with opened_page(width=1000, height=HEIGHT) as (page, _):
        for name, number in FIGURES.items():
            page.goto((PAGES / f"{name}.html").as_uri())
            page.wait_for_selector(".js-plotly-plot .main-svg")
            page.locator(".js-plotly-plot").nth(number).screenshot(path=taken / f"{name}.png")


def take_live(taken: Path, folder: Path) -> None:
    """Takes the timeline, then the live notebooks, in a JupyterLab on `folder`."""
    folder.mkdir()
    (folder / "profiles").symlink_to(ROOT / "profiles")
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(TIMELINE)]), folder / "timeline.ipynb")
    for notebook in LIVE:
        shutil.copy(ROOT / "notebooks" / f"{notebook}.ipynb", folder)
    with jupyterlab(folder, width=WIDTH, height=HEIGHT) as lab:
        open_and_run(lab, "timeline")
        lab.page.wait_for_selector('.labkit-timeline[data-state="ready"]')
        lab.page.locator(".labkit-timeline").screenshot(path=taken / "timeline.png")
        for notebook, heading in LIVE.items():
            open_and_run(lab, notebook)
            press_run(lab.page)
            show_heading(lab.page, heading)
            lab.page.locator(".jp-NotebookPanel:visible").screenshot(path=taken / f"{notebook}_live.png")


def open_and_run(lab: Lab, notebook: str) -> None:
    lab.open(f"{notebook}.ipynb")
    lab.page.evaluate("() => window.jupyterapp.shell.collapseLeft()")
    lab.run_all()


def press_run(page: Any) -> None:
    """Presses Run and waits until it can be pressed again."""
    page.locator('button[title="Run"]:visible').first.click()
    page.wait_for_selector('button[title="Stop"]:enabled')
    page.wait_for_selector('button[title="Run"]:enabled', timeout=MEASURED_S * 1000)
    page.wait_for_timeout(3000)  # the figures are drawn


def show_heading(page: Any, heading: str) -> None:
    page.locator("h2", has_text=heading).first.evaluate("(title) => title.scrollIntoView()")
    page.wait_for_timeout(500)


if __name__ == "__main__":
    main()
