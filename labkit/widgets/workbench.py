"""One comparison under controls: choose, run, and see every figure follow."""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any

from labkit.figures.summary import headline
from labkit.harness import Comparison, compare
from labkit.progress import HEADLINE_MIME_TYPE, as_output
from labkit.widgets.controls import SIZES, Controls
from labkit.widgets.live import Slot, is_live

Draw = Callable[[Comparison], Any]  # to a figure, Markdown text, or anything that a notebook can show


class Workbench:
    """Runs `labkit.compare` with settings that controls change, and keeps every view up to date.

    Live, showing the workbench gives the controls, whose Run button measures again; without anybody at the kernel it
    gives the table of the settings. `run` and `view` do the same in both.
    """

    def __init__(
        self,
        *,
        model: str,
        dtype: str = "float32",
        batch: int = 1,
        prompt_tokens: int = 128,
        new_tokens: int = 64,
        baseline: str = "hf-eager",
        threads: int = 0,
        rounds: int = 6,
    ) -> None:
        """`threads` 0: as many as torch would use."""
        texts = {"model": model, "dtype": dtype}
        sizes = {"batch": batch, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens}
        self.settings = texts | sizes | {"baseline": baseline, "threads": threads, "rounds": rounds}
        for name, value in self.settings.items():
            expected = int if name in SIZES else str
            if type(value) is not expected:
                raise TypeError(f"got {name} = {value!r}, expected {expected.__name__}")
        self.comparison: Comparison | None = None
        self._views: list[tuple[Slot, Draw]] = []
        self._controls = Controls(self.settings, self._measure) if is_live() else None

    def run(self) -> None:
        """Measure with the present settings, showing progress; the result is in `comparison`."""
        if self._controls:
            self._controls.show_progress()
            with self._controls.busy(stoppable=False) as follow:
                self._measure(self._controls.settings, follow)
            return
        slot = Slot(as_output(0, 1, "starting"))
        found = self._measure(self.settings, lambda done, total, label: slot.replace(as_output(done, total, label)))
        line = headline(found)
        slot.replace({HEADLINE_MIME_TYPE: line, "text/markdown": f"**{line}**", "text/plain": line})

    def view(self, draw: Draw) -> None:
        """Show `draw(comparison)` here, now and after every later run."""
        if self.comparison is None:
            raise RuntimeError("nothing has been measured yet; run the cell that calls run() first")
        self._views.append((Slot(draw(self.comparison)), draw))

    def _measure(self, settings: dict[str, Any], follow: Callable[[int, int, str], None]) -> Comparison:
        self.comparison = compare(
            baseline=settings["baseline"],
            model=settings["model"],
            dtype=settings["dtype"],
            batch=settings["batch"],
            prompt=settings["prompt_tokens"],
            new=settings["new_tokens"],
            threads=settings["threads"] or None,
            rounds=settings["rounds"],
            progress=follow,
        )
        for slot, draw in self._views:
            slot.replace(draw(self.comparison))
        if self._controls:
            self._controls.say(headline(self.comparison))
        return self.comparison

    def _repr_mimebundle_(self, **options: Any) -> Any:
        if self._controls:
            return self._controls.box._repr_mimebundle_(**options)
        names = "".join(f"<th>{html.escape(name.replace('_', ' '))}</th>" for name in self.settings)
        values = "".join(f"<td>{html.escape(str(value))}</td>" for value in self.settings.values())
        table = f"<table><thead><tr>{names}</tr></thead><tbody><tr>{values}</tr></tbody></table>"
        return {"text/html": table, "text/plain": str(self.settings)}
