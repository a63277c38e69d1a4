"""One measurement under controls: choose, run, and see every figure follow."""

from __future__ import annotations

import html
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

from labkit.studies.outcome import Outcome
from labkit.system.errors import RunError, UserError, UserTypeError
from labkit.system.progress import HEADLINE_MIME_TYPE, OUTCOME_MIME_TYPE, Progress, as_output
from labkit.widgets.controls import AMOUNTS, SIZES, Controls, setting_words
from labkit.widgets.live import Execution, Slot, is_live

Result = TypeVar("Result")
NOT_YET = "*Nothing has been measured yet: press Run.*"


NO_CHECKS: Mapping[str, Callable[[str], object]] = {}


@dataclass(frozen=True)
class View:
    """An output that follows the runs. `cell`: that showed it, by id and by execution."""

    cell: Execution
    slot: Slot
    draw: Callable[[], Any]


class Bench(ABC, Generic[Result]):
    """Measures with settings that controls change, and keeps every view up to date.

    Live, showing it gives the controls, whose Run button measures, and nothing is measured before it is pressed;
    without anybody at the kernel it gives the table of the settings, and `run` measures.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        choices: Mapping[str, Iterable[str]],
        checks: Mapping[str, Callable[[str], object]] = NO_CHECKS,
    ) -> None:
        """choices: what may be chosen of a setting. checks: what raises UserError for the text of a setting."""
        self.settings = settings = {name: _as_control(name, value) for name, value in settings.items()}
        for name, value in settings.items():
            expected = int if name in SIZES else float if name in AMOUNTS else str
            if type(value) is not expected:
                raise UserTypeError(f"got {name} = {value!r}, expected {expected.__name__}")
            if (limits := SIZES.get(name) or AMOUNTS.get(name)) and not limits[0] <= settings[name] <= limits[1]:
                raise UserError(f"got {name} = {value}, expected {limits[0]} to {limits[1]}")
        for name, check in checks.items():
            check(settings[name])
        self._found: Result | None = None
        self._views: list[View] = []
        self._controls = Controls(settings, choices, self._measure) if is_live() else None

    @abstractmethod
    def measure(self, settings: dict[str, Any], follow: Progress) -> Result:
        """The result of these settings; `follow` is told how far it is."""

    @abstractmethod
    def headline(self, found: Result) -> str:
        """The result in a line."""

    @abstractmethod
    def outcome(self, found: Result) -> Outcome:
        """The result, its grade and the machine."""

    @property
    def found(self) -> Result:
        """The latest result. Raises RuntimeError before the first run."""
        if self._found is None:
            then = "press Run" if self._controls else "run the cell that calls run() first"
            raise RunError(f"nothing has been measured yet; {then}")
        return self._found

    def run(self) -> None:
        """In batch, measure, showing progress. Live, offer to: the Run button, and below it the outcome of each run."""
        if self._controls:
            self._controls.show_buttons()
            self._show(lambda: {"text/plain": ""} if self._found is None else self._told(self._found))
            return
        slot = Slot(as_output(0, 1, "starting"))
        found = self._measure(self.settings, lambda done, total, label: slot.replace(as_output(done, total, label)))
        slot.replace(self._told(found))

    def view(self, draw: Callable[[Result], Any]) -> None:
        """Show `draw(found)`, a figure, Markdown text or anything that a notebook can show, of the latest run.

        Raises RuntimeError in batch before the run.
        """
        self._show(lambda: NOT_YET if self._controls and self._found is None else draw(self.found))

    def check(self, verdict: Callable[..., Any], *answers: object) -> None:
        """Show `verdict(found, *answers)`, as a view of the latest run."""
        self.view(lambda found: verdict(found, *answers))

    def of_model(self, draw: Callable[..., Any], *more: object) -> None:
        """Show `draw(model, *more)` for the model of the settings, and after each run for the one that it was of."""
        self._show(lambda: draw(self.settings["model"], *more))

    def _show(self, draw: Callable[[], Any]) -> None:
        cell = Execution.now()
        self._views = [view for view in self._views if not view.cell.replaced_by(cell)]
        self._views.append(View(cell, Slot(draw()), draw))

    def _measure(self, settings: dict[str, Any], follow: Progress) -> Result:
        self._found = self.measure(settings, follow)
        self.settings = settings
        for view in self._views:
            view.slot.replace(view.draw())
        if self._controls:
            self._controls.say("done; every figure and check shows this run")
        return self._found

    def _told(self, found: Result) -> dict[str, Any]:
        line, outcome = self.headline(found), self.outcome(found)
        told = f"**{outcome.claim}**\n\n- Trust: {outcome.grade}\n- Machine: {outcome.machine}"
        return {
            HEADLINE_MIME_TYPE: line,
            OUTCOME_MIME_TYPE: asdict(outcome),
            "text/markdown": told,
            "text/plain": line,
        }

    def _repr_mimebundle_(self, **options: Any) -> Any:
        if self._controls:
            return self._controls.box._repr_mimebundle_(**options)
        rows = (
            f"<tr><th>{html.escape(name.replace('_', ' '))}</th><td>{html.escape(setting_words(name, value))}</td></tr>"
            for name, value in self.settings.items()
        )
        return {"text/html": f"<table><tbody>{''.join(rows)}</tbody></table>", "text/plain": str(self.settings)}


def _as_control(name: str, value: object) -> object:
    """A value that papermill gave, as the control of that setting has it: `-p batches 4` is a number there, and
    `-p memory_gb 1` no float.
    """
    if isinstance(value, bool) or name in SIZES:
        return value
    if name in AMOUNTS:
        return float(value) if isinstance(value, int) else value
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return str(value) if isinstance(value, int | float) else value
