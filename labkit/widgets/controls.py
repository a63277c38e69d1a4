"""The widgets of a workbench: one control per setting, the buttons Run and Stop, and a progress bar."""

from __future__ import annotations

import html
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import ipywidgets as ipw
from IPython.display import display

from labkit.studies.settings import StudySetting
from labkit.system.errors import RunError
from labkit.system.interrupts import interrupt
from labkit.system.progress import Progress
from labkit.widgets.page import BOX, CLOCK, OWN, WAITING, Clock, Page

Measure = Callable[[dict[str, Any], Progress], object]

OUTSIDE = "another run is under way; wait for its end, or press Stop at its own controls"
BUTTON = {"width": "96px", "flex": "0 0 auto"}
BAR = {"width": "240px", "flex": "0 1 auto"}
OFFER = "Nothing has been measured yet: Run measures with these settings."
STOPPED = "Stopped; the figures show the previous run, if there was one."


class Stopped(KeyboardInterrupt):
    """The Stop button was pressed. Code that keeps a part of a result after Ctrl-C keeps it after Stop, too."""


class Controls:
    """The controls of a bench, in `box`. When Run is pressed, `measure` is called with the settings on a thread.

    Only one run is possible at a time, also with several controls: a second run would disturb the first one's times.
    """

    _running = threading.Lock()

    def __init__(self, declared: Mapping[str, StudySetting], settings: Mapping[str, Any], measure: Measure) -> None:
        self._measure = measure
        self._stop = threading.Event()
        self._raised = False  # whether the run has got `Stopped`
        self._thread: threading.Thread | None = None  # the last one that was started
        self._ending = threading.Lock()
        self._interruptible: threading.Thread | None = None  # the thread that Stop may interrupt
        self._show_last: Callable[[], None]  # shows the offered result
        self._inputs = {name: _input(declared[name], value) for name, value in settings.items()}
        self._run = ipw.Button(description="Run", button_style="primary", icon="play", layout=BUTTON)
        self._end = ipw.Button(description="Stop", icon="stop", disabled=True, layout=BUTTON)
        self._last = ipw.Button(
            description="Show last", icon="history", layout=BUTTON | {"width": "116px", "display": "none"}
        )
        self._bar = ipw.FloatProgress(min=0, max=1, layout=BAR)
        self._clock = Clock()
        self._clock.add_class(CLOCK)
        self.page = Page()
        self._label = ipw.HTML(html.escape(OFFER))
        self._run.on_click(lambda _: self.start())
        self._end.on_click(lambda _: self.stop())
        self._last.on_click(lambda _: self._show_last())
        columns = {"grid_template_columns": "repeat(auto-fit, minmax(min(400px, 100%), 400px))", "grid_gap": "4px 24px"}
        grid = ipw.GridBox(list(self._inputs.values()), layout=columns)
        # The label has its own line: next to the buttons a long message would squeeze them.
        row = ipw.HBox([self._run, self._end, self._last, self._bar, self._clock])
        self._buttons = ipw.VBox([row, self._label])
        self._buttons.add_class(OWN)
        self.box = ipw.VBox([self.page, grid, self._buttons], layout={"margin": "0 0 10px 0", "grid_gap": "10px"})
        for name in (OWN, BOX):
            self.box.add_class(name)

    @property
    def settings(self) -> dict[str, Any]:
        return {name: control.value for name, control in self._inputs.items()}

    @settings.setter
    def settings(self, settings: dict[str, Any]) -> None:
        for name, control in self._inputs.items():
            control.value = settings[name]

    def offer(self, show: Callable[[], None], words: str) -> None:
        """Offers an earlier result with a button next to Run, in these words, until something is measured or shown."""
        self._show_last = show
        self._last.layout.display = None
        self.say(f"{OFFER} {words}")

    def show_buttons(self) -> None:
        """Shows the buttons and the progress bar again, in the running cell."""
        display(self._buttons)

    def say(self, text: str) -> None:
        """Shows text under the buttons."""
        self._label.value = html.escape(text)

    def _say_error(self, text: str) -> None:
        self._label.value = f"<span style='color:#d0453a'>{html.escape(text)}</span>"

    def start(self) -> None:
        """Measures with the settings, on a thread."""
        self._thread = threading.Thread(target=self._run_on_thread, daemon=True, name="labkit-run")
        self._thread.start()

    def stop(self) -> None:
        """Ends the run, and says so at once. A process that the run waits for is ended, too."""
        if self._stop.is_set():
            return
        self._end.disabled = True
        self._stop.set()
        self.say("stopping…")
        with self._ending:
            if self._interruptible is not None:
                self._raised = True
                interrupt(self._interruptible, Stopped)

    @contextmanager
    def busy(self) -> Iterator[Progress]:
        """Locks the controls inside this context, and yields the function that takes the progress. RuntimeError:
        another run is under way.
        """
        if not self._running.acquire(blocking=False):
            self._say_error(OUTSIDE)
            raise RunError(OUTSIDE)
        self._stop.clear()
        self._raised = False
        self._disable(inputs=True, stop=False)
        self._last.layout.display = "none"
        self._bar.bar_style = ""
        self._clock.start()
        try:
            yield self._follow
            self._bar.bar_style, self._bar.value = "success", self._bar.max
        except KeyboardInterrupt:
            self._bar.bar_style = "warning"
            self.say(STOPPED)
            raise
        except BaseException as error:
            self._bar.bar_style = "danger"
            self._say_error(str(error) or type(error).__name__)
            raise
        finally:
            self._clock.end()
            self._bar.remove_class(WAITING)
            self._disable(inputs=False, stop=True)
            self._running.release()

    def _run_on_thread(self) -> None:
        # There is no cell to raise in; busy() has shown the error.
        with suppress(Exception, KeyboardInterrupt), self.busy() as follow:
            self._interruptible = threading.current_thread()
            try:
                self._measure(self.settings, follow)
            finally:
                self._ignore_stop()

    def _ignore_stop(self) -> None:
        """Makes Stop do nothing from now on: an interrupt would hit the code that unlocks the controls."""
        with self._ending:
            self._interruptible = None
            interrupt(threading.current_thread(), None)

    def _follow(self, done: float, total: float, label: str) -> None:
        if self._stop.is_set() and not self._raised:  # once: a run that keeps a part of its result goes on to the end
            self._raised = True
            raise Stopped
        self._bar.max, self._bar.value = total, done or total  # without progress the whole bar pulses
        (self._bar.remove_class if done else self._bar.add_class)(WAITING)
        self._clock.follow(done, total)
        self.say(label)

    def _disable(self, *, inputs: bool, stop: bool) -> None:
        for control in (*self._inputs.values(), self._run):
            control.disabled = inputs
        self._end.disabled = stop


def _input(setting: StudySetting, value: Any) -> ipw.Widget:
    look = {
        "description": setting.name.replace("_", " "),
        "tooltip": setting.help,
        "style": {"description_width": "110px"},
        "layout": {"width": "auto"},
    }
    if setting.choices:
        return ipw.Dropdown(value=value, options=list(dict.fromkeys([*setting.choices, value])), **look)
    if setting.suggestions:
        return ipw.Combobox(value=value, options=list(setting.suggestions), **look)
    if setting.kind is str:
        return ipw.Text(value=value, continuous_update=False, **look)
    least, most = setting.bounds
    if setting.kind is float:
        return ipw.BoundedFloatText(value=value, min=least, max=most, step=0.1, **look)
    return ipw.BoundedIntText(value=value, min=least, max=most, **look)
