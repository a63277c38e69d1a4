"""The progress of long work: a bar in the terminal, and an output of a notebook cell."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich import progress as bars
from rich.console import Console

from labkit.system.shown import shown

MIME_TYPE = "application/vnd.labkit.progress+json"
HEADLINE_MIME_TYPE = "application/vnd.labkit.headline"
OUTCOME_MIME_TYPE = "application/vnd.labkit.outcome+json"
Progress = Callable[[float, float, str], None]  # done, total, label of what runs now


def unheard(done: float, total: float, label: str) -> None:
    """Ignores the progress, for work without a viewer."""


def part_of(follow: Progress, begin: float, end: float, whole: float, prefix: str = "") -> Progress:
    """The progress of a part of the work, from `begin` to `end` of `whole`. Its labels begin with `prefix`."""
    return lambda done, total, label: follow(begin + (end - begin) * done / max(total, 1), whole, prefix + label)


def as_output(done: float, total: float, label: str) -> dict[str, Any]:
    """A display output by MIME type: the state for labkit's own programs, one line of text for other readers."""
    return {MIME_TYPE: {"done": done, "total": total, "label": label}, "text/plain": label}


@contextmanager
def progress_bar(console: Console) -> Iterator[Progress]:
    """A bar that is redrawn only when the work reports: a thread that redraws it would slow the timed runs."""
    columns = (
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
        bars.TextColumn("{task.description}", markup=False),
    )
    disable = not console.is_terminal  # a file would get an empty line
    with bars.Progress(*columns, console=console, transient=True, auto_refresh=False, disable=disable) as bar:
        task = bar.add_task("starting", total=None)

        def follow(done: float, total: float, label: str) -> None:
            bar.update(task, completed=done, total=total, description=shown(label), refresh=True)

        yield follow
