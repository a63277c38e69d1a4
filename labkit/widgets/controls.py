"""The widgets of a workbench: one control per setting, the buttons Run and Stop, and a progress bar."""

from __future__ import annotations

import html
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import ipywidgets as ipw
from IPython.display import display

from labkit.models.presets import PRESETS
from labkit.system.errors import RunError
from labkit.system.interrupts import interrupt
from labkit.system.progress import Progress
from labkit.widgets.page import BOX, CLOCK, OWN, WAITING, Clock, Page

Measure = Callable[[dict[str, Any], Progress], object]

HELP = {
    "model": "a preset, a checkpoint folder or a hub id",
    "dtype": "type of weights and activations",
    "baseline": "the side with which the fused engine is compared",
    "batch": "sequences in a batch",
    "prompt_tokens": "tokens of each prompt",
    "new_tokens": "tokens to generate",
    "context": "tokens in the KV cache of each sequence",
    "impl": "language of the fused kernels",
    "threads": "0: chosen for this machine",
    "rounds": "runs of each side, interleaved; fewer than 6 are not trusted",
    "candidate": "the side that is compared with the baseline",
    "tp_sizes": "numbers of ranks, separated by commas; 1 is always measured",
    "precisions": "names as for `labkit evaluate --dtype`, separated by commas; the first is the baseline",
    "tokens": "tokens of the text that each precision predicts",
    "steps": "decode steps of each side",
    "question": "a question for each side, if the model is a chat model",
    "precision": "a name as for `labkit evaluate --dtype`",
    "memory_gb": "GB (1e9 bytes) for weights, slots, caches and workspace together",
    "batches": "batch sizes, separated by commas",
    "baselines": "sides of `labkit compare`, separated by commas; or none",
    "path": "a folder on the disk for offloaded layers; empty: a temporary one",
    "stages": "ranks that each have some of the layers",
    "schedules": "some of queue, rounds, barrier and naive, separated by commas",
    "micro_batches": "numbers of micro-batches, separated by commas",
    "source": "nsys, torch (torch.profiler), bundled (captures that come with labkit), or auto",
}
SIZES = {
    "stages": (2, 64),
    "batch": (1, 256),
    "prompt_tokens": (1, 4096),
    "new_tokens": (2, 4096),
    "tokens": (16, 65_536),
    "context": (1, 65_536),
    "threads": (0, 256),
    "rounds": (2, 99),
    "steps": (1, 512),
}
AMOUNTS = {"memory_gb": (0.001, 100_000.0)}
OUTSIDE = "another run is under way; wait for its end, or press Stop at its own controls"
BUTTON = {"width": "96px", "flex": "0 0 auto"}
BAR = {"width": "240px", "flex": "0 1 auto"}
OFFER = "Nothing has been measured yet: Run measures with these settings."
STOPPED = "Stopped; the figures show the previous run, if there was one."


def setting_words(name: str, value: object) -> str:
    """The value of a setting or a parameter in words: "0 threads" would be misleading."""
    return "chosen for this machine" if name == "threads" and value == 0 else str(value)


class Stopped(BaseException):
    """The Stop button was pressed. Like KeyboardInterrupt it is not an Exception, so that no handler catches it."""


class Controls:
    """The controls of a bench, in `box`. When Run is pressed, `measure` is called with the settings on a thread.

    Only one run is possible at a time, also with several controls: a second run would disturb the first one's times.
    """

    _running = threading.Lock()

    def __init__(self, settings: dict[str, Any], choices: Mapping[str, Iterable[str]], measure: Measure) -> None:
        self._measure = measure
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._ending = threading.Lock()
        self._interruptible = False
        self._inputs = {name: _input(name, value, choices) for name, value in settings.items()}
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
        self._last.on_click(lambda _: show())
        self._last.layout.display = None
        self.say(f"{OFFER} {words}")

    def show_buttons(self) -> None:
        """Shows the buttons and the progress bar again, in the running cell."""
        display(self._buttons)

    def say(self, text: str) -> None:
        """Shows text under the buttons."""
        self._label.value = html.escape(text)

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
            if self._thread is not None and self._interruptible:
                interrupt(self._thread, Stopped)

    @contextmanager
    def busy(self) -> Iterator[Progress]:
        """Locks the controls inside this context, and yields the function that takes the progress. RuntimeError:
        another run is under way.
        """
        if not self._running.acquire(blocking=False):
            raise RunError(OUTSIDE)
        self._stop.clear()
        self._disable(inputs=True, stop=False)
        self._last.layout.display = "none"
        self._bar.bar_style = ""
        self._clock.start()
        try:
            yield self._follow
            self._bar.bar_style, self._bar.value = "success", self._bar.max
        except Stopped:
            self._bar.bar_style = "warning"
            self.say(STOPPED)
            raise
        except BaseException as error:
            self._bar.bar_style = "danger"
            self._label.value = f"<span style='color:#d0453a'>{html.escape(str(error) or type(error).__name__)}</span>"
            raise
        finally:
            self._clock.end()
            self._bar.remove_class(WAITING)
            self._disable(inputs=False, stop=True)
            self._running.release()

    def _run_on_thread(self) -> None:
        # There is no cell to raise in; busy() has shown the error.
        with suppress(Exception, Stopped), self.busy() as follow:
            self._interruptible = True
            try:
                self._measure(self.settings, follow)
            finally:
                self._ignore_stop()

    def _ignore_stop(self) -> None:
        """Makes Stop do nothing from now on: an interrupt would hit the code that unlocks the controls."""
        with self._ending:
            self._interruptible = False
            interrupt(threading.current_thread(), None)

    def _follow(self, done: float, total: float, label: str) -> None:
        if self._stop.is_set():
            raise Stopped
        self._bar.max, self._bar.value = total, done or total  # without progress the whole bar pulses
        (self._bar.remove_class if done else self._bar.add_class)(WAITING)
        self._clock.follow(done, total)
        self.say(label)

    def _disable(self, *, inputs: bool, stop: bool) -> None:
        for control in (*self._inputs.values(), self._run):
            control.disabled = inputs
        self._end.disabled = stop


def _input(name: str, value: Any, choices: Mapping[str, Iterable[str]]) -> ipw.Widget:
    look = {
        "description": name.replace("_", " "),
        "tooltip": HELP.get(name, ""),
        "style": {"description_width": "110px"},
        "layout": {"width": "auto"},
    }
    if name == "model":
        return ipw.Combobox(value=value, options=list(PRESETS), **look)
    if name in choices:
        return ipw.Dropdown(value=value, options=list(dict.fromkeys([*choices[name], value])), **look)
    if isinstance(value, str):
        return ipw.Text(value=value, continuous_update=False, **look)
    if name in AMOUNTS:
        least_amount, most_amount = AMOUNTS[name]
        return ipw.BoundedFloatText(value=value, min=least_amount, max=most_amount, step=0.1, **look)
    least, most = SIZES[name]
    return ipw.BoundedIntText(value=value, min=least, max=most, **look)
