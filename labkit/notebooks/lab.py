"""JupyterLab on copies of the notebooks, and its start page: the notebooks in order, with duration and requirements."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from labkit.notebooks.carried import ENDING, carried_notebooks, title
from labkit.notebooks.workshop.exercises import exercises
from labkit.system.markdown import markdown_table
from labkit.system.output_folder import runs_of
from labkit.system.whole_file import write_whole

START = "00_start.ipynb"  # a notebook with one text cell, which JupyterLab shows and does not edit
# Minutes of a run with default settings on two cores, and requirements besides labkit.
NEEDS = {
    "01_vanilla_vs_fused": (2, "nothing more"),
    "02_kernel_by_kernel": (1, "nothing more"),
    "03_timelines": (2, "Nsight Systems if installed, else torch.profiler"),
    "04_tensor_parallel": (3, "two cores"),
    "05_precision": (8, "nothing more"),
    "06_larger_than_memory": (4, "2 GB on the disk"),
    "07_pipeline": (4, "two cores"),
    "08_experts": (2, "nothing more"),
}
PAGE = """# The notebooks of labkit

These are copies: change and run them as you like. Open one and run its cells (menu *Run*, *Run All Cells*). Then change
the controls near its top and press their button *Run*: every figure follows.

Begin with the first notebook, which runs anywhere. You can read the others in any order. Results go to the folder
`runs`.

{table}

Minutes are for a run with the default settings on two cores without a GPU. Each notebook ends with exercises.

The workshop has {count} more exercises, in files that a check reads. In a terminal `labkit workshop list` shows them.
`labkit workshop start {first}` copies the first one to the folder `workshop`; open its `exercise.ipynb` here.
"""


def lab_command(
    folder: Path, *, browser: bool = True, port: int | None = None, ip: str | None = None, more: Sequence[str] = ()
) -> list[str]:
    """The command that opens the start page in a folder of copies. The server's root is the folder that contains the
    copies' `runs`. One Ctrl-C ends the server with its kernels. more: further words for `jupyter lab`.
    """
    root = runs_of(folder.resolve()).parent
    inside = "".join(f"{part}/" for part in folder.resolve().relative_to(root).parts)
    options = {
        "ServerApp.root_dir": str(root),
        "LabApp.default_url": quote(f"/lab/tree/{inside}{START}"),
        "Application.log_level": "ERROR",
        "ServerApp.answer_yes": "True",
        "KernelManager.transport_encryption": "auto",
    }
    if not browser:
        options["ServerApp.open_browser"] = "False"
    if port is not None:
        options["ServerApp.port"] = str(port)
    if ip is not None:
        options["ServerApp.ip"] = ip
    if os.geteuid() == 0:
        options["ServerApp.allow_root"] = "True"
    words = (f"--{name}={value}" for name, value in options.items())
    return [sys.executable, "-P", "-m", "labkit.notebooks.lab_server", *words, *more]


def write_start_page(folder: Path) -> Path:
    """Writes the start page into a folder of copies and returns its path."""
    rows = []
    for name, path in carried_notebooks().items():
        minutes, needs = NEEDS.get(name, ("", ""))
        rows.append((f"[{name}]({quote(name)}{ENDING})", title(path), str(minutes), needs))
    known = list(exercises())
    table = markdown_table(("notebook", "question", "minutes", "needs"), rows)
    text = PAGE.format(table=table, count=len(known), first=known[0])
    cell = {"cell_type": "markdown", "id": "start", "metadata": {}, "source": text}
    about = {"kernelspec": {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}}
    page = folder / START
    write_whole(page, json.dumps({"cells": [cell], "metadata": about, "nbformat": 4, "nbformat_minor": 5}, indent=1))
    return page
