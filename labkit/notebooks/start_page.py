"""The start page of `labkit lab`: the notebooks in order, with their duration and requirements."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import quote

from labkit.notebooks.carried import ENDING, carried_notebooks, title
from labkit.system.markdown import markdown_table
from labkit.system.whole_file import write_whole

NAME = "00_start.ipynb"  # a notebook with one text cell, which JupyterLab shows and does not edit
# Minutes of a run with default settings on two cores, and requirements besides labkit.
NEEDS = {
    "01_vanilla_vs_fused": (2, "nothing more"),
    "02_kernel_by_kernel": (1, "nothing more"),
    "03_timelines": (2, "Nsight Systems if installed, else torch.profiler"),
    "04_tensor_parallel": (3, "two cores"),
    "05_precision": (8, "nothing more"),
    "06_larger_than_memory": (4, "2 GB on the disk"),
    "07_pipeline": (4, "two cores"),
}
PAGE = """# The notebooks of labkit

These are copies: change and run them as you like. Open one and run its cells (menu *Run*, *Run All Cells*). Then change
the controls near its top and press their button *Run*: every figure follows.

Begin with the first notebook, which runs anywhere. You can read the others in any order. Results go to the folder
`runs`.

{table}

Minutes are for a run with the default settings on two cores without a GPU. Each notebook ends with exercises.
"""


def write_start_page(folder: Path) -> Path:
    """Writes the page into a folder of copies and returns its path."""
    rows = []
    for name, path in carried_notebooks().items():
        minutes, needs = NEEDS.get(name, ("", ""))
        rows.append((f"[{name}]({quote(name)}{ENDING})", title(path), str(minutes), needs))
    text = PAGE.format(table=markdown_table(("notebook", "question", "minutes", "needs"), rows))
    cell = {"cell_type": "markdown", "id": "start", "metadata": {}, "source": text}
    about = {"kernelspec": {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}}
    page = folder / NAME
    write_whole(page, json.dumps({"cells": [cell], "metadata": about, "nbformat": 4, "nbformat_minor": 5}, indent=1))
    return page
