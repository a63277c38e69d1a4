"""Consoles that escape the control characters of their text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook
from rich.segment import Segment

from labkit.system.shown import shown_lines

LEAST_WIDTH = 60  # columns that a table of names and numbers needs; a narrower terminal breaks the lines itself


def terminal(*, stderr: bool = False, **options: Any) -> Console:
    """A console for stdout or stderr. It escapes control characters in strangers' names (`labkit.system.shown`). Tables
    escape their cells earlier, so that columns have the width of the escaped text.
    """
    console = Console(stderr=stderr, **options)
    if console.width < LEAST_WIDTH:
        console.width = LEAST_WIDTH
    console.push_render_hook(_Shown())
    return console


class _Shown(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_WithoutControls(renderable) for renderable in renderables]


@dataclass(frozen=True)
class _WithoutControls:
    inner: ConsoleRenderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self.inner, options):
            yield segment if segment.control else Segment(shown_lines(segment.text), segment.style)
