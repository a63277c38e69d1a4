"""Helpers in the page of a live notebook: dark colours of figures, saving of results, and a clock."""

from __future__ import annotations

from pathlib import Path
from time import time

import anywidget
import traitlets

from labkit.figures.dark import dark_rules

HERE = Path(__file__).parent
DARK_PAGE = 'body[data-jp-theme-light="false"] .js-plotly-plot'
WAITING = "labkit-waiting"  # class of a progress bar without progress yet
PULSE = f"""
@keyframes {WAITING} {{ 50% {{ opacity: 0.25; }} }}
.{WAITING} .progress-bar {{ animation: {WAITING} 1.6s ease-in-out infinite; }}
@media (prefers-reduced-motion: reduce) {{ .{WAITING} .progress-bar {{ animation: none; opacity: 0.4; }} }}
"""
OWN, BOX, CLOCK = "labkit-own", "labkit-box", "labkit-clock"  # classes of widgets
DEAD = f"""
.{OWN}.jupyter-widgets-disconnected::before, .{OWN} .jupyter-widgets-disconnected::before {{
  display: none !important;
}}
.{CLOCK}.jupyter-widgets-disconnected {{ display: none; }}
.{BOX}.jupyter-widgets-disconnected::before {{
  display: block !important; align-self: start; padding: 4px 0; color: var(--jp-ui-font-color1);
  font: var(--jp-ui-font-size1)/1.5 var(--jp-ui-font-family);
  content: "This was saved with the notebook. To measure, run its cells again: Run > Run All Cells.";
}}
"""
KNOWN = 0.05  # fraction of the work after which the remaining time is estimated


class Page(anywidget.AnyWidget):
    """An invisible widget. `results` counts the results: the page saves the notebook when it grows."""

    _esm = HERE / "page.js"
    _css = dark_rules(DARK_PAGE, "var(--jp-layout-color0)") + PULSE + DEAD
    results = traitlets.Int(0).tag(sync=True)


class Clock(anywidget.AnyWidget):
    """The time since a run began, and an estimate of the rest. The browser counts the seconds: a thread of the kernel
    would disturb the timed runs.

    Times are in seconds; 0 or less means unknown.
    """

    _esm = HERE / "clock.js"
    begun = traitlets.Float(0).tag(sync=True)  # start of the run, since 1970
    estimated = traitlets.Float(0).tag(sync=True)  # time of the estimate `left`, since 1970
    left = traitlets.Float(-1).tag(sync=True)  # estimated rest of the run
    took = traitlets.Float(-1).tag(sync=True)  # duration of a run that has ended

    def start(self) -> None:
        with self.hold_sync():
            self.begun, self.left, self.took = time(), -1.0, -1.0

    def follow(self, done: float, total: float) -> None:
        """Updates the estimate: `done` of `total` is done."""
        if KNOWN * total <= done <= total:
            with self.hold_sync():
                self.estimated = time()
                self.left = (self.estimated - self.begun) * (total - done) / done if done else -1.0

    def end(self) -> None:
        self.took = time() - self.begun
