"""Plotly figures from records. Nothing here measures, and nothing displays: only a notebook does."""

from labkit.figures.beside import published_figure, region_figure
from labkit.figures.latency import latency_figure, per_token_figure
from labkit.figures.regions import (
    fusion_figure,
    ladder_figure,
    layer_figure,
    regions_figure,
    regions_table,
    roofline_figure,
)
from labkit.figures.stages import stage_figure
from labkit.figures.summary import headline, notes, summary_table
from labkit.figures.theme import SIDE_COLORS, STAGE_COLORS

__all__ = [
    "SIDE_COLORS",
    "STAGE_COLORS",
    "fusion_figure",
    "headline",
    "ladder_figure",
    "latency_figure",
    "layer_figure",
    "notes",
    "per_token_figure",
    "published_figure",
    "region_figure",
    "regions_figure",
    "regions_table",
    "roofline_figure",
    "stage_figure",
    "summary_table",
]
