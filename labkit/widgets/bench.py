"""A study with controls for its settings. Every figure follows the latest run."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from inspect import Parameter, Signature
from typing import Any, ClassVar, Generic, Self, TypeVar, get_type_hints

from labkit.studies.last import Last, keep_last, now, read_last
from labkit.studies.outcome import Outcome
from labkit.studies.settings import StudySetting, setting_words, settings_of
from labkit.system.errors import RunError, UserError
from labkit.system.nearest import did_you_mean
from labkit.system.output_folder import RUNS
from labkit.system.partly import NotMeasuredError
from labkit.system.progress import HEADLINE_MIME_TYPE, OUTCOME_MIME_TYPE, Progress, as_output
from labkit.widgets.controls import Controls
from labkit.widgets.live import Execution, Slot, is_live

Result = TypeVar("Result")
NOT_YET = "*Nothing has been measured yet: press Run, under the controls near the top.*"
KEPT = "stopped, and what was measured until then is kept"
UNDER_WAY = "*This is being measured.*"


@dataclass(frozen=True)
class View:
    """Content that is drawn again after each run."""

    cell: Execution  # that showed the content
    slot: Slot  # that holds the content
    draw: Callable[[], Any]  # returns the present content


class StudyBench(Generic[Result]):
    """Runs a study with the settings of its controls, and keeps every view up to date.

    A subclass names the study, whose signature declares the settings. In a live notebook a bench shows its controls,
    and only their Run button measures. The last result is kept in `runs`, and offered until something is measured. In a
    batch run a bench shows the table of its settings, and `run` measures.
    """

    study: ClassVar[Callable[..., Any]]
    declared: ClassVar[Mapping[str, StudySetting]]  # settings of the study, by name
    kind: ClassVar[type]  # class of the results
    _newest: ClassVar[dict[str, StudyBench[Any]]] = {}  # of each class; it also offers the results of older benches

    def __init_subclass__(cls) -> None:
        cls.declared, cls.kind = settings_of(cls.study), get_type_hints(cls.study)["return"]
        parameters = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=setting.default, annotation=setting.kind)
            for name, setting in cls.declared.items()
        ]
        cls.__signature__ = Signature(parameters)  # type: ignore[attr-defined]  # for help() and completion
        lines = "".join(f"\n    - {name}: {setting.help}." for name, setting in cls.declared.items())
        cls.__doc__ = f"{cls.__doc__}\n{lines}"

    def __init__(self, **settings: Any) -> None:
        """Takes settings of the study by name; the others have their defaults.

        UserError for an unknown name, and for a value of the wrong type, out of its bounds or refused by the study.
        """
        for name in settings.keys() - self.declared.keys():
            raise UserError(
                f"unknown setting {name!r}{did_you_mean(name, self.declared)}; expected {', '.join(self.declared)}"
            )
        self.settings: dict[str, Any] = {
            name: setting.value(settings.get(name, setting.default)) for name, setting in self.declared.items()
        }
        self._last: Last[Result] | None = None
        self._partly: Result | None = None  # of the run that is under way
        self._busy = False
        self._views: list[View] = []
        self._name = type(self).__name__
        self._controls = Controls(self.declared, self.settings, self._measure) if is_live() else None
        if self._controls:
            self._newest[self._name] = self

    @classmethod
    def of(cls, names: Mapping[str, Any]) -> Self:
        """A bench with the settings among these names: `of(globals())` takes the parameters of a notebook."""
        return cls(**{name: names[name] for name in cls.declared if name in names})

    @staticmethod
    def headline(result: Any, /) -> str:
        """The result in one line, and its grade."""
        line: str = result.headline
        return line

    @staticmethod
    def outcome(result: Any, /) -> Outcome:
        """The result, its grade and the machine."""
        outcome: Outcome = result.outcome
        return outcome

    @property
    def found(self) -> Result:
        """The latest result, or the parts of it that are measured so far. Raises RuntimeError before the first run."""
        if self._partly is not None:
            return self._partly
        if self._last is None or self._busy:
            remedy = "press Run" if self._controls else "run the cell that calls run() first"
            raise NotMeasuredError(f"nothing has been measured yet; {remedy}")
        return self._last.result

    def run(self) -> None:
        """In a batch run, measures and shows the progress. Live, shows the Run button and the outcome of each run."""
        if self._controls:
            self._controls.show_buttons()
            self._show(self._outcome)
            self._offer()
            return
        slot = Slot(as_output(0, 1, "starting"))
        self._measure(self.settings, lambda done, total, label: slot.replace(as_output(done, total, label)))
        slot.replace(self._outcome())

    def view(self, draw: Callable[[Result], Any]) -> None:
        """Shows `draw(result)` of the latest run: a figure, Markdown text or anything else that a notebook can show.

        Raises RuntimeError in a batch run before `run`.
        """
        self._show(lambda: draw(self.found))

    def check(self, verdict: Callable[..., Any], *answers: object) -> None:
        """Shows `verdict(result, *answers)` as a view of the latest run."""
        self.view(lambda result: verdict(result, *answers))

    def of_model(self, draw: Callable[..., Any], *more: object) -> None:
        """Shows `draw(model, *more)` for the model of the settings, and after each run for the model of that run."""
        self._show(lambda: draw(self.settings["model"], *more))

    def _show(self, draw: Callable[[], Any]) -> None:
        cell = Execution.now()
        for view in self._views:
            if view.cell.replaced_by(cell):
                view.slot.close()
        self._views = [view for view in self._views if not view.cell.replaced_by(cell)]
        self._views.append(View(cell, Slot(self._drawn(draw)), draw))

    def _drawn(self, draw: Callable[[], Any]) -> Any:
        """The present content of a view. Live, it is a remark while the view's part is not measured."""
        try:
            return draw()
        except NotMeasuredError as error:
            if self._controls is None:
                raise
            if self._busy:
                return UNDER_WAY
            return NOT_YET if self._last is None else _remark(error)
        except Exception as error:
            if self._partly is None:
                raise
            return f"*This is drawn when the run has ended ({type(error).__name__}).*"  # an error must not end the run

    def _redraw(self, views: Sequence[View] = ()) -> None:
        """Draws these views again, or all."""
        for view in views or self._views:
            view.slot.replace(self._drawn(view.draw))

    def _measure(self, settings: dict[str, Any], follow: Progress) -> None:
        before, self.settings = self.settings, settings
        self._busy = True
        try:
            if self._controls:
                self._controls.page.results += 1  # a page that is opened during the run finds its figures
                self._redraw()
            result: Result = type(self).study(**settings, progress=follow, show=self._show_part)
            of = self.outcome(result).of
            self.settings = settings | {name: value for name, value in of.items() if name in settings}
            self._last = Last(self.settings, now(), result)
        except BaseException:
            self.settings = before
            raise
        else:
            if self._controls:  # before the figures are drawn: one that raises must not lose the result
                keep_last(self._last, self.kind, self._name, RUNS)
        finally:
            self._busy, self._partly = False, None
            self._redraw()
        if self._controls:
            self._controls.page.results += 1
            stopped = getattr(result, "interrupted", False)
            self._controls.say(f"{KEPT if stopped else 'done'}; every figure and check shows this run")
            self._newest[self._name]._offer()

    def _show_part(self, partly: Result) -> None:
        """Redraws the figures whose part of the run is measured, while the run goes on."""
        if self._controls:
            self._partly = partly
            self._redraw()

    def _offer(self) -> None:
        """Offers the last result from `runs` while nothing is measured."""
        if not self._controls or self._last or self._busy:
            return
        last: Last[Result] | None = read_last(self.kind, self._name, RUNS)
        if last and last.settings.keys() == self.settings.keys():
            self._controls.offer(lambda: self._take(last), f"Show last shows the result of {_when(last.measured)}.")

    def _take(self, last: Last[Result]) -> None:
        """Shows a kept result, and says that it is from an earlier time."""
        assert self._controls
        before = self.settings, self._last
        self.settings, self._last = last.settings, last
        try:
            self._redraw()
        except (OSError, UserError, RunError) as error:  # for instance because its captures were deleted
            self.settings, self._last = before
            self._redraw()
            self._controls.say(f"the last result cannot be shown: {error}")
            return
        self._controls.settings = last.settings
        self._controls.say(f"the result of {_when(last.measured)}, kept in {RUNS}; Run measures again")

    def _outcome(self) -> dict[str, Any]:
        if self._last is None or self._busy:
            return {"text/plain": ""}
        result, measured = self._last.result, self._last.measured
        line, outcome = self.headline(result), self.outcome(result)
        summary = f"**{outcome.claim}**\n\n- Trust: {outcome.grade}\n- Machine: {outcome.machine}"
        return {
            HEADLINE_MIME_TYPE: line,
            OUTCOME_MIME_TYPE: asdict(outcome),
            "text/markdown": f"{summary}\n- Measured: {_when(measured)}",
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


def _remark(error: NotMeasuredError) -> str:
    """The error's own sentence in Markdown."""
    sentence = str(error)
    return f"*{sentence[0].upper()}{sentence[1:]}.*"


def _when(moment: datetime) -> str:
    return f"{moment.astimezone():%Y-%m-%d %H:%M}"
