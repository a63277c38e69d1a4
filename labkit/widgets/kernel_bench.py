"""The regions of a layer, with controls for the settings and a way to step through them."""

from __future__ import annotations

from functools import partial
from typing import Any

import ipywidgets as ipw
import plotly.graph_objects as go
from IPython.display import display

from labkit.figures.regions import fusion_figure, layer_figure
from labkit.harness.regions.case import IMPLS
from labkit.models.dtypes import DTYPES
from labkit.stages import FUSED_REGIONS
from labkit.studies.kernels import KernelStudy, study_kernels
from labkit.studies.outcome import Outcome
from labkit.system.partly import Show
from labkit.system.progress import Progress
from labkit.widgets.bench import Bench
from labkit.widgets.live import is_live


def _drawing(index: int, found: KernelStudy) -> go.Figure:
    return fusion_figure(found.regions[index])


class KernelBench(Bench[KernelStudy]):
    """Runs `study_kernels`."""

    kind = KernelStudy

    def __init__(
        self,
        *,
        model: str,
        dtype: str = "float32",
        batch: int = 1,
        context: int = 128,
        impl: str = "cpp",
        threads: int = 0,
        rounds: int = 15,
    ) -> None:
        """With `threads` 0 there are as many as torch would use."""
        settings = {"model": model, "dtype": dtype, "batch": batch, "context": context, "impl": impl}
        super().__init__(settings | {"threads": threads, "rounds": rounds}, {"dtype": DTYPES, "impl": IMPLS})

    def measure(self, settings: dict[str, Any], follow: Progress, show: Show) -> KernelStudy:
        return study_kernels(**settings | {"threads": settings["threads"] or None}, progress=follow, show=show)

    def headline(self, found: KernelStudy) -> str:
        return found.headline

    def outcome(self, found: KernelStudy) -> Outcome:
        return found.outcome

    def step_through(self) -> None:
        """Show region by region what is fused, and the timeline of a layer with it. Buttons step through the regions
        where somebody is at the kernel; otherwise all are shown.
        """
        regions = len(FUSED_REGIONS)
        if not is_live():
            for index in range(regions):
                self.view(partial(_drawing, index))
            self.view(partial(layer_figure, regions=regions))
            return
        buttons = {-1: ipw.Button(description="previous", icon="arrow-left"), 1: ipw.Button(description="next")}
        where = ipw.Label()
        display(ipw.HBox([*buttons.values(), where]))
        at = 0
        self.view(lambda found: _drawing(at, found))
        self.view(lambda found: layer_figure(found, at + 1))
        shown = self._views[-2:]

        def step(by: int) -> None:
            nonlocal at
            at += by
            buttons[-1].disabled, buttons[1].disabled = at == 0, at == regions - 1
            where.value = f"region {at + 1} of {regions}: {FUSED_REGIONS[at]}"
            for view in shown if by else ():
                view.slot.replace(view.draw())

        for by, button in buttons.items():
            button.on_click(lambda _, by=by: step(by))
        step(0)
