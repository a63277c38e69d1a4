"""Runs a notebook from start to end in a fresh kernel, and reports how the run ended."""

import asyncio
import math
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import nbformat
from jupyter_client.kernelspec import NoSuchKernel
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError
from nbclient.util import ensure_async, run_sync
from nbformat import NotebookNode
from papermill.iorw import load_notebook_node
from traitlets.config import Config

from labkit.notebooks.carried import find_notebook
from labkit.notebooks.failure import Failure, NotebookError
from labkit.notebooks.injected import with_parameters
from labkit.notebooks.parameters import checked_values, read_parameters
from labkit.notebooks.report import html_report, outputs_of_type
from labkit.system.errors import RunError, UserError
from labkit.system.home import expanded
from labkit.system.input_file import read_file
from labkit.system.json_file import parse_json
from labkit.system.output_folder import RUNS, check_output_folder, reason
from labkit.system.progress import HEADLINE_MIME_TYPE, MIME_TYPE, Progress
from labkit.system.whole_file import whole_file

SECONDS_TO_END = 5.0  # for a cell to end after an interrupt


@dataclass(frozen=True)
class RunReport:
    """How a run ended, and the files that it wrote."""

    status: Literal["passed", "failed"]
    notebook: Path
    html: Path
    parameters: dict[str, Any]  # every parameter, defaults included
    seconds: float
    failure: Failure | None
    headlines: tuple[str, ...]  # results that the notebook's cells declared, one line each


def run_notebook(
    path: str | Path,
    parameters: Mapping[str, object] | None = None,
    output_dir: str | os.PathLike[str] = RUNS,
    progress: Progress | None = None,
    *,
    timeout_s: float | None = None,
) -> RunReport:
    """Executes the notebook at `path` with `parameters` and writes OUTPUT_DIR/STEM.ipynb and OUTPUT_DIR/STEM.html.

    - path: a file, or the name of one of labkit's notebooks, such as "01_vanilla_vs_fused".
    - progress: receives the number of finished cells; a running cell counts in part.
    - timeout_s: limit for each cell; a cell that exceeds it is interrupted and fails the run.

    The kernel starts in the current directory. Both files are written at the end, each whole or not at all. The files
    of a failed run are called STEM.failed.*, so that they never replace a good report. The HTML file contains all that
    it shows, and loads nothing from a network.

    Raises:
        NotebookError: not a notebook, no parameters cell, no such kernel, or an output that would replace the input.
        ParameterError: an unknown parameter or a value of the wrong type.
        UserError: a timeout that is not a positive number, or an output folder that is not writable.
        RunError: the report cannot be made or written; the message says where the executed notebook is kept.
        KeyboardInterrupt: Ctrl-C or SIGTERM; the kernel is stopped and nothing is written.
    """
    if timeout_s is not None and not 0 < timeout_s < math.inf:
        raise UserError(f"got timeout_s = {timeout_s}, expected a number of seconds above 0, or None for no limit")
    path, output_dir = find_notebook(path), expanded(output_dir)
    notebook = _read(path)
    declared = read_parameters(notebook)
    chosen = checked_values(declared, parameters or {})
    values = {parameter.name: parameter.default for parameter in declared} | chosen
    check_output_folder(output_dir)
    targets = {failed: _targets(path, output_dir, failed=failed) for failed in (False, True)}
    if any(target.exists() and target.samefile(path) for names in targets.values() for target in names):
        raise NotebookError(f"the output would replace {path}; choose an output folder other than {output_dir}")
    if chosen:
        notebook = with_parameters(notebook, chosen)

    started = time.perf_counter()
    failure = _execute(notebook, progress, timeout_s)
    seconds = time.perf_counter() - started
    executed, html = targets[failure is not None]
    content = nbformat.writes(notebook)
    with _kept_on_error(executed.name, content):
        page = html_report(notebook, title=path.stem, parameters=values, seconds=seconds, failure=failure)
        _write_whole({executed: content, html: page})
    status: Literal["passed", "failed"] = "failed" if failure else "passed"
    headlines = tuple(outputs_of_type(notebook, HEADLINE_MIME_TYPE))
    return RunReport(status, executed, html, values, seconds, failure, headlines)


def _read(path: Path) -> NotebookNode:
    expected = "a Jupyter notebook"
    try:
        content = parse_json(read_file(path, expected), path, expected)
        if not isinstance(content, dict) or not isinstance(content.get("nbformat"), int):
            raise UserError(f"{path} is not {expected}: it does not state the version of its format")
        if content["nbformat"] >= 4 and not isinstance(content.get("cells"), list):
            raise UserError(f"{path} is not {expected}: it has no list of cells")
        notebook = load_notebook_node(str(path))
        nbformat.validate(notebook)
    except UserError as error:
        raise NotebookError(str(error)) from None
    except (ValueError, KeyError, AttributeError, TypeError, nbformat.ValidationError) as error:
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise NotebookError(f"{path} is not {expected}: {cause}") from error
    return notebook


class _Client(NotebookClient):
    """Reports the running cell and its progress, and ends a cell that takes too long."""

    def __init__(self, notebook: NotebookNode, report: Progress | None, timeout_s: float | None) -> None:
        kernel = notebook.metadata.get("kernelspec", {}).get("name", "python3")
        encrypted = Config(KernelManager={"transport_encryption": "auto"})
        super().__init__(notebook, kernel_name=kernel, config=encrypted)
        self.timeout_s = timeout_s
        self.current: int | None = None
        self.interrupted = False
        self._cleaning_up = False
        self._report = report
        self._codes = [i for i, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
        self.on_cell_execute = self._follow

    def _follow(self, cell: NotebookNode, cell_index: int) -> None:
        self.current = cell_index
        self._say(0.0, _first_line(cell))

    def _say(self, part: float, label: str) -> None:
        if self._report is not None and self.current is not None:
            self._report(self._codes.index(self.current) + part, len(self._codes), label)

    def process_message(self, msg: dict[str, Any], cell: NotebookNode, cell_index: int) -> NotebookNode | None:
        step = msg["content"].get("data", {}).get(MIME_TYPE)
        if step:
            self._say(step["done"] / max(step["total"], 1), step["label"])
        return super().process_message(msg, cell, cell_index)

    async def async_execute_cell(
        self, cell: NotebookNode, cell_index: int, execution_count: int | None = None, store_history: bool = True
    ) -> NotebookNode:
        """Interrupts a cell that takes too long, gives it time to clean up, and raises TimeoutError.

        nbclient's own limit would kill the kernel, and leave processes that the cell has started.
        """
        running = asyncio.ensure_future(super().async_execute_cell(cell, cell_index, execution_count, store_history))
        done, _ = await asyncio.wait({running}, timeout=self.timeout_s)
        if done:
            return running.result()
        assert self.km is not None
        await ensure_async(self.km.interrupt_kernel())
        await asyncio.wait({running}, timeout=SECONDS_TO_END)
        running.cancel()
        await asyncio.wait({running})
        raise TimeoutError

    async def async_start_new_kernel(self, **options: Any) -> None:
        self._take_signals()
        await super().async_start_new_kernel(**options)

    async def _async_cleanup_kernel(self) -> None:
        """Cleans up the kernel if it still exists: nbclient calls this again at exit after an interrupted cleanup."""
        self._cleaning_up = True
        if self.km is not None:
            await super()._async_cleanup_kernel()

    _cleanup_kernel = run_sync(_async_cleanup_kernel)

    def _take_signals(self) -> None:
        """Handles SIGINT and SIGTERM: interrupts the running cell, so that it can clean up, and ends the run.

        nbclient's own handlers would kill the kernel.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        loop, run = asyncio.get_running_loop(), asyncio.current_task()
        assert run is not None

        def stop() -> None:
            self.interrupted = True
            if self.km is None or self.current is None:
                run.cancel()
                return
            self._interruption = asyncio.ensure_future(ensure_async(self.km.interrupt_kernel()))
            loop.call_later(SECONDS_TO_END, give_up)

        def give_up() -> None:
            if not self._cleaning_up:  # an interrupted cleanup would leave a kernel
                run.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop)


def _execute(notebook: NotebookNode, progress: Progress | None, timeout_s: float | None) -> Failure | None:
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    client = _Client(notebook, progress, timeout_s)
    reason = None
    try:
        asyncio.run(client.async_execute(env=os.environ | {"PLOTLY_RENDERER": "plotly_mimetype"}))
    except NoSuchKernel as error:
        raise NotebookError(
            f"no kernel named {error.name!r} is installed; 'jupyter kernelspec list' shows the installed ones"
        ) from error
    except CellExecutionError as error:
        reason = f"{error.ename}: {error.evalue}".strip()
    except TimeoutError:
        reason = f"it did not end within {timeout_s:g} s, the limit for a cell"
    except DeadKernelError:
        reason = "the kernel died"
    except asyncio.CancelledError:
        pass
    if client.interrupted:
        raise KeyboardInterrupt
    if reason is not None and client.current is not None:
        return Failure(client.current + 1, _first_line(notebook.cells[client.current]), reason)
    for position, cell in enumerate(notebook.cells, start=1):
        skipped = client.skip_cells_with_tag in cell.metadata.get("tags", [])
        if cell.cell_type == "code" and cell.source.strip() and cell.execution_count is None and not skipped:
            return Failure(position, _first_line(cell), "was not executed")
    return None


def _first_line(cell: NotebookNode) -> str:
    return next((line.strip() for line in cell.source.splitlines() if line.strip()), "")


def _targets(path: Path, folder: Path, *, failed: bool) -> tuple[Path, Path]:
    """The executed notebook and its report."""
    stem = f"{path.stem}.failed" if failed else path.stem
    return folder / f"{stem}.ipynb", folder / f"{stem}.html"


@contextmanager
def _kept_on_error(name: str, content: str) -> Iterator[None]:
    """Keeps the executed notebook, which may have taken hours, in a temporary folder if the block fails."""
    try:
        yield
    except Exception as error:
        cause = (
            f"{reason(error)} ({error.filename})" if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        )
        try:
            kept = Path(tempfile.mkdtemp(prefix="labkit-run-"), name)
            kept.write_text(content, encoding="utf-8")
        except OSError:
            raise error from None
        raise RunError(f"the report could not be written: {cause}; the executed notebook is kept as {kept}") from error


def _write_whole(files: Mapping[Path, str]) -> None:
    """Writes the files. Each appears under its name only when all are complete."""
    with ExitStack() as written:
        for target, text in files.items():
            written.enter_context(whole_file(target)).write_text(text, encoding="utf-8")
