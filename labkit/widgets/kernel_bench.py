"""The regions of a layer, with controls for the settings and buttons to step through the regions."""

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


def _region_figure(index: int, study: KernelStudy) -> go.Figure:
    return fusion_figure(study.regions[index])


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
        """Takes the settings of `study_kernels`.

        - model: a preset, a checkpoint folder or a hub id.
        - dtype: type of weights and activations.
        - batch: sequences in a batch.
        - context: tokens of each sequence in the KV cache.
        - impl: language of the fused kernels.
        - threads: 0: the number that torch would use.
        - rounds: interleaved rounds.
        """
        settings = {"model": model, "dtype": dtype, "batch": batch, "context": context, "impl": impl}
        super().__init__(settings | {"threads": threads, "rounds": rounds}, {"dtype": DTYPES, "impl": IMPLS})

    def measure(self, settings: dict[str, Any], follow: Progress, show: Show) -> KernelStudy:
        return study_kernels(**settings | {"threads": settings["threads"] or None}, progress=follow, show=show)

    def headline(self, result: KernelStudy) -> str:
        return result.headline

    def outcome(self, result: KernelStudy) -> Outcome:
        return result.outcome

    def step_through(self) -> None:
        """Shows for each region the ops that are fused, and the timeline of a layer with these regions fused. Live,
        buttons step through the regions; in a batch run all are shown.
        """
        regions = len(FUSED_REGIONS)
        if not is_live():
            for index in range(regions):
                self.view(partial(_region_figure, index))
            self.view(partial(layer_figure, regions=regions))
            return
        buttons = {-1: ipw.Button(description="previous", icon="arrow-left"), 1: ipw.Button(description="next")}
        label = ipw.Label()
        display(ipw.HBox([*buttons.values(), label]))
        index = 0
        self.view(lambda study: _region_figure(index, study))
        self.view(lambda study: layer_figure(study, index + 1))
        shown = self._views[-2:]

        def step(by: int) -> None:
            nonlocal index
            index += by
            buttons[-1].disabled, buttons[1].disabled = index == 0, index == regions - 1
            label.value = f"region {index + 1} of {regions}: {FUSED_REGIONS[index]}"
            for view in shown if by else ():
                view.slot.replace(view.draw())

        for by, button in buttons.items():
            button.on_click(lambda _, by=by: step(by))
        step(0)
