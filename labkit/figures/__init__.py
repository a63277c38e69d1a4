"""Plotly figures from records. Nothing here measures, and nothing displays: only a notebook does."""

from labkit.figures.captures import captures_table
from labkit.figures.cold_start import cold_start_figure
from labkit.figures.difference import difference_figure, difference_table, stage_difference_table
from labkit.figures.doctor import checks_table
from labkit.figures.epochs import epochs_figure
from labkit.figures.experts import (
    choice_figure,
    experts_figure,
    experts_in_memory_figure,
    ranks_figure,
    reads_figure,
    tokens_figure,
)
from labkit.figures.latency import latency_figure, per_token_figure
from labkit.figures.offload import offload_figure
from labkit.figures.parallel import cut_figure, gpus_figure, scaling_figure, waiting_figure
from labkit.figures.pipeline import (
    bubble_figure,
    micro_batch_figure,
    pipeline_gains_figure,
    ways_figure,
)
from labkit.figures.pipeline_ideal import ideal_figure
from labkit.figures.pipeline_timeline import pipeline_timeline_figure, prompt_timeline_figure
from labkit.figures.precision import (
    costs_figure,
    errors_figure,
    front_figure,
    outliers_figure,
    precision_answers,
    precision_table,
)
from labkit.figures.published_panels import published_figure, region_figure
from labkit.figures.regions import (
    fusion_figure,
    ladder_figure,
    layer_figure,
    regions_figure,
    regions_table,
    roofline_figure,
)
from labkit.figures.residency import residency_figure
from labkit.figures.saving import save
from labkit.figures.stage_table import stage_table_figure
from labkit.figures.stages import stage_figure
from labkit.figures.stream_timeline import stream_timeline_figure
from labkit.figures.streaming import batch_figure, memory_figure
from labkit.figures.summary import answers, notes, study_notes, summary_table
from labkit.figures.theme import SIDE_COLORS, STAGE_COLORS
from labkit.figures.timeline import timeline
from labkit.studies.comparison_words import headline

__all__ = [
    "SIDE_COLORS",
    "STAGE_COLORS",
    "answers",
    "batch_figure",
    "bubble_figure",
    "captures_table",
    "checks_table",
    "choice_figure",
    "cold_start_figure",
    "costs_figure",
    "cut_figure",
    "difference_figure",
    "difference_table",
    "epochs_figure",
    "errors_figure",
    "experts_figure",
    "experts_in_memory_figure",
    "front_figure",
    "fusion_figure",
    "gpus_figure",
    "headline",
    "ideal_figure",
    "ladder_figure",
    "latency_figure",
    "layer_figure",
    "memory_figure",
    "micro_batch_figure",
    "notes",
    "offload_figure",
    "outliers_figure",
    "per_token_figure",
    "pipeline_gains_figure",
    "pipeline_timeline_figure",
    "precision_answers",
    "precision_table",
    "prompt_timeline_figure",
    "published_figure",
    "ranks_figure",
    "reads_figure",
    "region_figure",
    "regions_figure",
    "regions_table",
    "residency_figure",
    "roofline_figure",
    "save",
    "scaling_figure",
    "stage_difference_table",
    "stage_figure",
    "stage_table_figure",
    "stream_timeline_figure",
    "study_notes",
    "summary_table",
    "timeline",
    "tokens_figure",
    "waiting_figure",
    "ways_figure",
]
