"""The progress of a long piece of work: as a bar in the terminal, and as an output of a notebook cell."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

MIME_TYPE = "application/vnd.labkit.progress+json"
HEADLINE_MIME_TYPE = "application/vnd.labkit.headline"


def as_output(done: float, total: float, label: str) -> dict[str, Any]:
    """A display output, by MIME type: the state for a program, one line of text for everybody else."""
    return {MIME_TYPE: {"done": done, "total": total, "label": label}, "text/plain": label}


@contextmanager
def progress_bar(console: Console) -> Iterator[Callable[[float, float, str], None]]:
    """A bar that moves with the work only: a thread that redraws it would cost the runs being timed."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task("starting", total=None)

        def follow(done: float, total: float, label: str) -> None:
            bar.update(task, completed=done, total=total, description=label, refresh=True)

        yield follow
