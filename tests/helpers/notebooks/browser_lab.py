"""Notebooks that tests open in a real JupyterLab, if the machine has a browser for it."""

from pathlib import Path

import pytest
from nbformat import write
from nbformat.v4 import new_code_cell, new_notebook

from labkit.widgets import browser

needs_browser = pytest.mark.skipif(browser.missing() is not None, reason=f"no browser test: {browser.missing()}")


def write_notebook(folder: Path, *sources: str, name: str = "test.ipynb") -> str:
    """Writes a notebook with a cell for each of `sources`; returns its name."""
    write(new_notebook(cells=[new_code_cell(source) for source in sources]), folder / name)
    return name
