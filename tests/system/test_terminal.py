"""Lines of other programs reach files unchanged and fast, and a terminal in one piece."""

from __future__ import annotations

import io
from time import process_time

import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook
from rich.console import Console

from labkit.system.terminal import line_writer, terminal

LINES = ["x" * 200, "a [bold]b[/bold]", " 3.5 'text' http://x ", "\x1b[32mgreen\x1b[0m\tü"]


def test_lines_reach_a_file_unchanged() -> None:
    file = io.StringIO()
    write = line_writer(terminal(file=file, markup=False, highlight=False))
    for line in LINES:
        write(line)
    assert file.getvalue() == "".join(f"{line}\n" for line in LINES)


def test_lines_reach_a_terminal_unbroken_and_cannot_control_it() -> None:
    file = io.StringIO()
    console = terminal(file=file, markup=False, highlight=False, force_terminal=True, width=80)
    write = line_writer(console)
    for line in LINES:
        write(line)
    lines = file.getvalue().splitlines()
    assert lines[:3] == LINES[:3]
    assert "\x1b[32m" not in lines[3]
    assert "\\x1b[32mgreen" in lines[3]


def test_a_megabyte_of_lines_takes_little_time() -> None:
    """Rich's own printing of these lines takes more than a second."""
    write = line_writer(terminal(file=io.StringIO(), markup=False, highlight=False))
    before = process_time()
    for number in range(20_000):
        write(f"{number} " + "x" * 50)
    assert process_time() - before < 0.5


def test_a_notebook_gets_no_widgets_of_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would stay in a saved notebook, without their contents."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert Console().is_jupyter
    assert not terminal(stderr=True).is_jupyter


def test_a_notebook_keeps_no_state_of_a_bar() -> None:
    """Its kernel sets FORCE_COLOR, from which rich would take its stderr for a terminal."""
    source = """
import os
from labkit.system.progress import progress_bar
from labkit.system.terminal import terminal

console = terminal(stderr=True)
with progress_bar(console) as follow:
    follow(1, 2, "packed")
console.print("FORCE_COLOR is", os.environ["FORCE_COLOR"], highlight=False)
"""
    notebook = new_notebook(cells=[new_code_cell(source)])
    NotebookClient(notebook, kernel_name="python3", timeout=120).execute()
    assert "".join(output["text"] for output in notebook.cells[0].outputs) == "FORCE_COLOR is 1\n"
