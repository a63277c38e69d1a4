"""One measurement under controls: choose, run, and see every figure follow."""

from __future__ import annotations

import html
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

from labkit.system.errors import RunError, UserError, UserTypeError
from labkit.system.progress import HEADLINE_MIME_TYPE, Progress, as_output
from labkit.widgets.controls import SIZES, Controls
from labkit.widgets.live import Slot, is_live

Result = TypeVar("Result")


class Bench(ABC, Generic[Result]):
    """Measures with settings that controls change, and keeps every view up to date.

    Live, showing it gives the controls, whose Run button measures again; without anybody at the kernel it gives the
    table of the settings. `run` and `view` do the same in both.
    """

    def __init__(self, settings: dict[str, Any], choices: Mapping[str, Iterable[str]]) -> None:
        self.settings = settings
        for name, value in settings.items():
            expected = int if name in SIZES else str
            if type(value) is not expected:
                raise UserTypeError(f"got {name} = {value!r}, expected {expected.__name__}")
            if name in SIZES and not SIZES[name][0] <= settings[name] <= SIZES[name][1]:
                least, most = SIZES[name]
                raise UserError(f"got {name} = {value}, expected {least} to {most}")
        self._found: Result | None = None
        self._views: list[tuple[Slot, Callable[[Result], Any]]] = []
        self._controls = Controls(settings, choices, self._measure) if is_live() else None

    @abstractmethod
    def measure(self, settings: dict[str, Any], follow: Progress) -> Result:
        """The result of these settings; `follow` is told how far it is."""

    @abstractmethod
    def headline(self, found: Result) -> str:
        """The result in a line."""

    @property
    def found(self) -> Result:
        """The latest result. Raises RuntimeError before the first run."""
        if self._found is None:
            raise RunError("nothing has been measured yet; run the cell that calls run() first")
        return self._found

    def run(self) -> None:
        """Measure with the present settings, showing progress; the result is in `found`."""
        if self._controls:
            self._controls.show_progress()
            with self._controls.busy(stoppable=False) as follow:
                self._measure(self._controls.settings, follow)
            return
        slot = Slot(as_output(0, 1, "starting"))
        found = self._measure(self.settings, lambda done, total, label: slot.replace(as_output(done, total, label)))
        line = self.headline(found)
        slot.replace({HEADLINE_MIME_TYPE: line, "text/markdown": f"**{line}**", "text/plain": line})

    def view(self, draw: Callable[[Result], Any]) -> None:
        """Show `draw(found)`, a figure, Markdown text or anything that a notebook can show, now and after every run."""
        self._views.append((Slot(draw(self.found)), draw))

    def _measure(self, settings: dict[str, Any], follow: Progress) -> Result:
        self._found = self.measure(settings, follow)
        for slot, draw in self._views:
            slot.replace(draw(self._found))
        if self._controls:
            self._controls.say(self.headline(self._found))
        return self._found

    def _repr_mimebundle_(self, **options: Any) -> Any:
        if self._controls:
            return self._controls.box._repr_mimebundle_(**options)
        names = "".join(f"<th>{html.escape(name.replace('_', ' '))}</th>" for name in self.settings)
        values = "".join(f"<td>{html.escape(str(value))}</td>" for value in self.settings.values())
        table = f"<table><thead><tr>{names}</tr></thead><tbody><tr>{values}</tr></tbody></table>"
        return {"text/html": table, "text/plain": str(self.settings)}
