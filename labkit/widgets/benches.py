"""The benches of the notebooks."""

from __future__ import annotations

from functools import partial
from typing import Any

import ipywidgets as ipw
import plotly.graph_objects as go
from IPython.display import display

from labkit.figures.captures import captures_table
from labkit.figures.difference import difference_figure, difference_table, stage_difference_table
from labkit.figures.regions import fusion_figure, layer_figure
from labkit.figures.stage_table import stage_table_figure
from labkit.figures.timeline import timeline
from labkit.harness.comparison import Comparison
from labkit.stages import FUSED_REGIONS
from labkit.studies import comparison_words
from labkit.studies.comparison import study_comparison
from labkit.studies.experts import study_experts
from labkit.studies.experts_study import ExpertsStudy
from labkit.studies.kernels import KernelStudy, study_kernels
from labkit.studies.larger_than_memory import StreamingStudy, study_larger_than_memory
from labkit.studies.parallel import ParallelStudy, study_parallel
from labkit.studies.pipeline import PipelineStudy, study_pipeline
from labkit.studies.precision import study_precision
from labkit.studies.precision_study import PrecisionStudy
from labkit.studies.traces import CapturePair, bundled_pair, capture_pair
from labkit.widgets.bench import StudyBench
from labkit.widgets.live import is_live
from labkit.widgets.timeline import Timeline

STEPS_SHOWN = 2  # decode steps on which the timelines open


class Workbench(StudyBench[Comparison]):
    """Compares the fused engine with a baseline."""

    study = staticmethod(study_comparison)
    headline = staticmethod(comparison_words.headline)
    outcome = staticmethod(comparison_words.outcome)


class ParallelBench(StudyBench[ParallelStudy]):
    """Compares one rank with more ranks."""

    study = staticmethod(study_parallel)


class PrecisionBench(StudyBench[PrecisionStudy]):
    """Measures several precisions of a model."""

    study = staticmethod(study_precision)


class ExpertsBench(StudyBench[ExpertsStudy]):
    """Shows what a mixture of experts chooses and reads."""

    study = staticmethod(study_experts)


class StreamingBench(StudyBench[StreamingStudy]):
    """Measures a model that is larger than memory."""

    study = staticmethod(study_larger_than_memory)


class PipelineBench(StudyBench[PipelineStudy]):
    """Measures schedules of a pipeline."""

    study = staticmethod(study_pipeline)


class KernelBench(StudyBench[KernelStudy]):
    """Measures the regions of a layer."""

    study = staticmethod(study_kernels)

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
            if by:
                self._redraw(shown)

        for by, button in buttons.items():
            button.on_click(lambda _, by=by: step(by))
        step(0)


def _region_figure(index: int, study: KernelStudy) -> go.Figure:
    return fusion_figure(study.regions[index])


class TraceBench(StudyBench[CapturePair]):
    """Captures two sides: stage by stage, on one time axis, and the difference explained."""

    study = staticmethod(capture_pair)

    def __init__(self, **settings: Any) -> None:
        """Takes settings as every bench. The captures that come with labkit have their own model, sides and steps."""
        bundled = bundled_pair().of if settings.get("source") == "bundled" else {}
        super().__init__(**settings | dict(bundled))

    def captures(self) -> None:
        """Shows the profiler, the run, the machine and the profiling tax of both captures."""
        self.view(captures_table)

    def stages(self) -> None:
        """Shows the time of a decode step, stage by stage, for both sides."""
        self.view(lambda pair: stage_table_figure(pair.tables[0], name=pair.names[0]))
        self.view(lambda pair: stage_table_figure(pair.tables[1], name=pair.names[1]))

    def timelines(self) -> None:
        """Shows both sides below each other on one time axis: a widget live, a figure in a batch run."""
        draw = Timeline if self._controls else timeline
        self.view(lambda pair: draw(pair.named_traces, steps=min(STEPS_SHOWN, pair.decode_steps)))

    def difference(self) -> None:
        """Shows the difference of a step as a waterfall and in words."""
        self.view(lambda pair: difference_figure(pair.difference))
        self.view(lambda pair: difference_table(pair.difference))
        self.view(lambda pair: stage_difference_table(pair.difference))
