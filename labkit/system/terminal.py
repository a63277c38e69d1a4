"""Consoles that escape the control characters of their text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook
from rich.segment import Segment

from labkit.system.shown import shown_lines

LEAST_WIDTH = 60  # columns that a table of names and numbers needs; a narrower terminal breaks the lines itself


def terminal(*, stderr: bool = False, **options: Any) -> Console:
    """A console for stdout or stderr. It escapes control characters in strangers' names (`labkit.system.shown`). Tables
    escape their cells earlier, so that columns have the width of the escaped text.

    In a notebook it writes text, as into a file: rich's widgets, and each state of its bars, would stay in the saved
    notebook.
    """
    console = Console(stderr=stderr, **options)
    if console.is_jupyter:
        console = Console(stderr=stderr, force_jupyter=False, force_terminal=False, **options)
    if console.width < LEAST_WIDTH:
        console.width = LEAST_WIDTH
    console.push_render_hook(_Shown())
    return console


def line_writer(console: Console) -> Callable[[str], None]:
    """Writes the lines of another program: unchanged into a file or a pipe; in a terminal as the console prints them,
    without breaking them. Rich takes 0.1 ms for a line, which programs of many lines would wait for.
    """
    if console.is_terminal:
        return lambda line: console.print(line, soft_wrap=True)
    return lambda line: print(line, file=console.file)


class _Shown(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_WithoutControls(renderable) for renderable in renderables]


@dataclass(frozen=True)
class _WithoutControls:
    inner: ConsoleRenderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self.inner, options):
            yield segment if segment.control else Segment(shown_lines(segment.text), segment.style)
