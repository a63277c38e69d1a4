"""The report of a run states its true outcome, and a run leaves complete files or none."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from helpers.notebooks.pages import Page
from helpers.sweeps import sweep
from nbformat.v4 import new_code_cell, new_notebook

from labkit.cli.main import main
from labkit.notebooks import NotebookError, ParameterError, execution, run_notebook
from labkit.notebooks.execution import _Client
from labkit.system.errors import RunError

PARAMETERS = 'name: str = "world"  # whom to greet\ntimes: int = 1\n'


def write(path: Path, *sources: str, tags: dict[int, list[str]] | None = None, kernel: str = "python3") -> Path:
    cells = [new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]})]
    cells += [
        new_code_cell(source, metadata={"tags": (tags or {}).get(index, [])}) for index, source in enumerate(sources)
    ]
    kernelspec = {"name": kernel, "display_name": kernel, "language": "python"}
    nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": kernelspec}), path)
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def printed(path: Path) -> str:
    cells = nbformat.read(path, as_version=4).cells
    return "".join(output.get("text", "") for cell in cells for output in cell.get("outputs", []))


def test_parameters_reach_the_cells_and_both_files_appear(tmp_path: Path) -> None:
    notebook = write(tmp_path / "hello.ipynb", "print(name * times)")
    report = run_notebook(notebook, {"name": "ab", "times": "3"}, tmp_path / "out")
    assert report.status == "passed"
    assert report.failure is None
    assert report.parameters == {"name": "ab", "times": 3}
    assert names(tmp_path / "out") == ["hello.html", "hello.ipynb"]
    assert printed(report.notebook) == "ababab\n"
    assert "ababab" in report.html.read_text()


def test_the_notebook_itself_is_not_touched(tmp_path: Path) -> None:
    notebook = write(tmp_path / "hello.ipynb", "print(name)")
    before = notebook.read_bytes()
    run_notebook(notebook, {"name": "x"}, tmp_path / "out")
    assert notebook.read_bytes() == before


def test_progress_counts_cells_and_passes_on_what_a_cell_shows(tmp_path: Path) -> None:
    source = (
        "from IPython.display import display\nfrom labkit.system.progress import as_output\n"
        "display(as_output(1, 4, 'a quarter'), raw=True)"
    )
    steps: list[tuple[float, float, str]] = []
    run_notebook(write(tmp_path / "n.ipynb", source, "1"), None, tmp_path / "out", lambda *step: steps.append(step))
    assert steps == [
        (0, 3, 'name: str = "world"  # whom to greet'),
        (1, 3, "from IPython.display import display"),
        (1.25, 3, "a quarter"),
        (2, 3, "1"),
    ]


def test_declared_results_are_in_the_report(tmp_path: Path) -> None:
    source = (
        "from IPython.display import display\nfrom labkit.system.progress import HEADLINE_MIME_TYPE\n"
        "display({HEADLINE_MIME_TYPE: 'twice as fast', 'text/plain': ''}, raw=True)"
    )
    assert run_notebook(write(tmp_path / "n.ipynb", source), None, tmp_path / "out").headlines == ("twice as fast",)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import os\nos._exit(1)", "the kernel died"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        pytest.param("import sys\nsys.exit(0)", "SystemExit: 0", marks=sweep),
    ],
)
def test_a_cell_that_ends_the_run_fails_it_by_name(tmp_path: Path, source: str, reason: str) -> None:
    notebook = write(tmp_path / "n.ipynb", "print('before')", source, "print('after')")
    report = run_notebook(notebook, None, tmp_path / "out")
    assert report.status == "failed"
    assert report.failure is not None
    assert (report.failure.cell, report.failure.code, report.failure.reason) == (3, source.splitlines()[0], reason)
    assert printed(report.notebook).startswith("before")
    assert "after" not in printed(report.notebook)
    assert reason in report.html.read_text()


def test_a_cell_that_takes_too_long_is_interrupted_and_fails_the_run(tmp_path: Path) -> None:
    """The report has the output until then, and the cell has time to clean up."""
    cleaned = tmp_path / "cleaned"
    slow = f"import time\nprint('began', flush=True)\ntry: time.sleep(600)\nfinally: open({str(cleaned)!r}, 'w')"
    notebook = write(tmp_path / "n.ipynb", "print('before')", slow, "print('after')")
    report = run_notebook(notebook, None, tmp_path / "out", timeout_s=5)
    assert report.failure is not None
    assert str(report.failure) == "cell 3 (import time): it did not end within 5 s, the limit for a cell"
    assert names(tmp_path / "out") == ["n.failed.html", "n.failed.ipynb"]
    assert printed(report.notebook) == "before\nbegan\n"
    assert cleaned.exists()


@pytest.mark.parametrize("limit", [0, -1, float("nan"), float("inf")])
def test_a_limit_that_is_none_is_refused(tmp_path: Path, limit: float) -> None:
    with pytest.raises(ValueError, match="expected a number of seconds above 0"):
        run_notebook(tmp_path / "n.ipynb", None, tmp_path / "out", timeout_s=limit)


def test_a_failed_run_does_not_replace_a_good_report(tmp_path: Path) -> None:
    run_notebook(write(tmp_path / "n.ipynb", "print('good')"), None, tmp_path / "out")
    run_notebook(write(tmp_path / "n.ipynb", "1 / 0"), None, tmp_path / "out")
    assert names(tmp_path / "out") == ["n.failed.html", "n.failed.ipynb", "n.html", "n.ipynb"]
    assert printed(tmp_path / "out" / "n.ipynb") == "good\n"


def test_an_error_that_a_cell_shows_on_purpose_is_no_failure(tmp_path: Path) -> None:
    notebook = write(tmp_path / "n.ipynb", "1 / 0", "print('on')", tags={0: ["raises-exception"]})
    report = run_notebook(notebook, None, tmp_path / "out")
    assert report.status == "passed"
    assert printed(report.notebook) == "on\n"


@pytest.mark.parametrize(
    ("parameters", "message"), [({"nmae": "x"}, "did you mean 'name'"), ({"times": "many"}, "expected int")]
)
def test_wrong_parameters_run_nothing(tmp_path: Path, parameters: dict[str, str], message: str) -> None:
    notebook = write(tmp_path / "n.ipynb", f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ParameterError, match=message):
        run_notebook(notebook, parameters, tmp_path / "out")
    assert names(tmp_path) == ["n.ipynb"]


def test_what_is_no_runnable_notebook_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotebookError, match="no notebook at"):
        run_notebook(tmp_path / "none.ipynb", None, tmp_path / "out")
    nbformat.write(new_notebook(cells=[new_code_cell("1")]), tmp_path / "bare.ipynb")
    with pytest.raises(NotebookError, match="no cell tagged 'parameters'"):
        run_notebook(tmp_path / "bare.ipynb", None, tmp_path / "out")
    with pytest.raises(NotebookError, match="no kernel named 'cobol'"):
        run_notebook(write(tmp_path / "k.ipynb", "1", kernel="cobol"), None, tmp_path / "out")
    assert names(tmp_path / "out") == []


FOUR = {"metadata": {}, "nbformat": 4, "nbformat_minor": 5}


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"not JSON", "is not JSON (Expecting value"),
        (b"", "is empty: "),
        (b'{"cells": [], "x": "\xff"}', "is not UTF-8 text (byte 20"),
        (b"[" * 100_000, "nests deeper than 32 levels; expected a Jupyter notebook"),
        (b"[1]", "is not a Jupyter notebook: it does not state the version"),
        (json.dumps({"a": 1}).encode(), "is not a Jupyter notebook: it does not state the version"),
        (json.dumps(FOUR).encode(), "is not a Jupyter notebook: it has no list of cells"),
        (json.dumps(FOUR | {"cells": 3}).encode(), "is not a Jupyter notebook: it has no list of cells"),
        (json.dumps(FOUR | {"cells": []}).encode(), "the notebook has no cell tagged 'parameters'"),
        (json.dumps(FOUR | {"cells": [{"cell_type": "code"}]}).encode(), "is not a Jupyter notebook: "),
        (json.dumps(FOUR | {"cells": [], "nbformat": 9}).encode(), "is not a Jupyter notebook: Unsupported nbformat"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_notebook_is_refused_in_one_line(tmp_path: Path, content: bytes, cause: str) -> None:
    (tmp_path / "n.ipynb").write_bytes(content)
    with pytest.raises(NotebookError, match=re.escape(cause)) as error_info:
        run_notebook(tmp_path / "n.ipynb", None, tmp_path / "out")
    assert "\n" not in str(error_info.value)


def test_the_output_never_replaces_the_notebook(tmp_path: Path) -> None:
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "n.html").symlink_to("../n.ipynb")
    for folder in (tmp_path, tmp_path / "linked"):
        with pytest.raises(NotebookError, match="would replace"):
            run_notebook(write(tmp_path / "n.ipynb", "1"), None, folder)


@pytest.mark.parametrize("broken", ["write", "report"])
def test_a_run_whose_last_write_fails_keeps_its_notebook(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **kwargs: Any) -> str:
        raise OSError(errno.ENOSPC, "", "out/n.html") if broken == "write" else RecursionError("too deep")

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(execution, "_execute", lambda *args: None)
    monkeypatch.setattr(execution, "_write_whole" if broken == "write" else "html_report", fails)
    with pytest.raises(
        RunError, match=r"the report could not be written: .*; the executed notebook is kept as "
    ) as error_info:
        run_notebook(write(tmp_path / "n.ipynb", "print('hours')"), None, tmp_path / "out")
    kept = Path(str(error_info.value).rpartition(" ")[2])
    assert nbformat.read(kept, as_version=4).cells[1].source == "print('hours')"
    assert names(tmp_path / "out") == []


@sweep
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_run_leaves_no_files_and_no_kernel(tmp_path: Path, number: signal.Signals) -> None:
    pid_file = tmp_path / "pid"
    notebook = write(
        tmp_path / "n.ipynb", f"import os, time\nopen({str(pid_file)!r}, 'w').write(str(os.getpid()))\ntime.sleep(120)"
    )
    code = "import sys; from labkit.notebooks import run_notebook; run_notebook(sys.argv[1], None, sys.argv[2])"
    arguments = [sys.executable, "-P", "-c", code, str(notebook), str(tmp_path / "out")]
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: pid_file.exists() and pid_file.read_text() != "")
    os.kill(process.pid, number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    assert number is signal.SIGKILL or "KeyboardInterrupt" in errors
    assert names(tmp_path / "out") == []
    wait_for(lambda: not psutil.pid_exists(int(pid_file.read_text())))


@sweep
def test_a_kernel_that_takes_long_to_end_is_waited_for_after_an_interrupt(tmp_path: Path) -> None:
    """The kernel takes longer than an interrupted cell may take."""
    pid_file = tmp_path / "pid"
    source = (
        "import atexit, os, time\natexit.register(time.sleep, 2)\n"
        f"open({str(pid_file)!r}, 'w').write(str(os.getpid()))\ntime.sleep(120)"
    )
    code = (
        "import sys; from labkit.notebooks import execution, run_notebook; execution.SECONDS_TO_END = 0.5; "
        "run_notebook(sys.argv[1], None, sys.argv[2])"
    )
    arguments = [sys.executable, "-P", "-c", code, str(write(tmp_path / "n.ipynb", source)), str(tmp_path / "out")]
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: pid_file.exists() and pid_file.read_text() != "")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert not psutil.pid_exists(int(pid_file.read_text()))


def test_what_is_left_to_do_at_exit_needs_no_kernel() -> None:
    """nbclient stops the kernel again at the end of the process if Ctrl-C interrupted the first attempt."""
    _Client(new_notebook(), None, None)._cleanup_kernel()


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@sweep
def test_any_notebooks_report_opens_without_a_network(tmp_path: Path) -> None:
    source = "import plotly.graph_objects as go\ngo.Figure(go.Bar(x=[1], y=[2]))"
    report = run_notebook(write(tmp_path / "n.ipynb", source, source), None, tmp_path / "out")
    page = Page(report.html.read_text())
    assert page.outside == []
    assert len(page.figures) == 2
    assert len(page.libraries) == 1


def test_the_command_takes_a_limit_for_each_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["labkit", "run", str(tmp_path / "n.ipynb"), "--timeout", "0", "-p", "x", "1"])
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert exit_info.value.code == 2
    assert "expected a number of seconds above 0" in capsys.readouterr().err
