"""Every figure of `labkit.figures`, drawn from made-up results."""

from __future__ import annotations

from typing import Any

from helpers.studies import (
    expert_studies,
    kernel_studies,
    parallel_studies,
    pipeline_studies,
    precision_studies,
    streaming_studies,
)
from helpers.studies.comparisons import comparison, in_epochs
from helpers.traces.handmade import FUSED, VANILLA, decode

from labkit import figures
from labkit.harness.comparison import Comparison
from labkit.models.policies import model_config_of
from labkit.models.presets import PRESETS
from labkit.nsys.analysis.difference import explain
from labkit.nsys.analysis.stage_table import stage_table
from labkit.nsys.timeline.synthetic import decode_trace


def drawings() -> dict[str, Any]:
    """Each figure by its name. A text would stand for a figure that its result does not allow."""
    record, traces = comparison(), (decode(VANILLA, steps=8), decode(FUSED, steps=8))
    side_by_side = {"vanilla": decode_trace(steps=4, layers=2), "fused": decode_trace(steps=4, layers=2)}
    precision, streaming = precision_studies.study(), streaming_studies.study()
    pipeline, parallel, kernels = pipeline_studies.study(), parallel_studies.study(), kernel_studies.study()
    experts = expert_studies.study()
    calls: list[tuple[Any, ...]] = [  # a figure and its results
        (figures.cold_start_figure, started(record)),
        (figures.cut_figure, model_config_of(PRESETS["qwen2-0.5b"].hf_config), 4),
        (figures.difference_figure, explain(*traces)),
        (figures.epochs_figure, of_epochs(record)),
        (figures.fusion_figure, kernels.regions[1]),
        (figures.layer_figure, kernels, 2),
        (figures.stage_table_figure, stage_table(traces[0], ("stage",))),
        (figures.timeline, side_by_side),
        *((draw, record) for draw in (figures.per_token_figure, figures.latency_figure, figures.stage_figure)),
        *((draw, record) for draw in (figures.region_figure, figures.published_figure)),
        *((draw, precision) for draw in (figures.front_figure, figures.costs_figure)),
        *((draw, precision) for draw in (figures.outliers_figure, figures.errors_figure)),
        *((draw, experts) for draw in (figures.experts_figure, figures.tokens_figure)),
        *((draw, experts) for draw in (figures.reads_figure, figures.choice_figure)),
        *((draw, experts) for draw in (figures.ranks_figure, figures.experts_in_memory_figure)),
        *((draw, streaming) for draw in (figures.batch_figure, figures.memory_figure, figures.residency_figure)),
        *((draw, streaming) for draw in (figures.offload_figure, figures.stream_timeline_figure)),
        *((draw, pipeline) for draw in (figures.ideal_figure, figures.bubble_figure, figures.micro_batch_figure)),
        *((draw, pipeline) for draw in (figures.ways_figure, figures.pipeline_gains_figure)),
        *((draw, pipeline) for draw in (figures.pipeline_timeline_figure, figures.prompt_timeline_figure)),
        *((draw, parallel) for draw in (figures.scaling_figure, figures.waiting_figure, figures.gpus_figure)),
        *((draw, kernels) for draw in (figures.regions_figure, figures.ladder_figure, figures.roofline_figure)),
    ]
    return {draw.__name__: draw(*results) for draw, *results in calls}


def of_epochs(record: Comparison) -> Comparison:
    """The comparison in eight epochs of four pairs, between which the times differ by some percent."""
    sides: dict[str, Any] = {}
    for place, (role, step_ms) in enumerate((("baseline", 36.0), ("candidate", 12.0))):
        factors = [1 + 0.01 * (epoch % 3) * (place + 1) for epoch in range(8)]
        epochs = [[(step_ms * factor, rate) for rate in (30.0, 60.0) * 2] for factor in factors]
        sides[role] = in_epochs(getattr(record, role), epochs, place=place)
    return record.model_copy(update={**sides, "looks": (3, 4, 6, 8)})


def started(record: Comparison) -> Comparison:
    """The comparison with times of starting and loading."""
    seconds = {"start_to_ready_s": 6.0, "load_s": 1.5, "first_run_s": 0.5}
    sides = {role: getattr(record, role).model_copy(update=seconds) for role in ("baseline", "candidate")}
    return record.model_copy(update=sides)
