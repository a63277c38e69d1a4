"""Controls for live notebooks. In a batch run the same calls show static output."""

from labkit.widgets.benches import (
    ExpertsBench,
    KernelBench,
    ParallelBench,
    PipelineBench,
    PrecisionBench,
    StreamingBench,
    TraceBench,
    Workbench,
)
from labkit.widgets.live import is_live
from labkit.widgets.timeline import Timeline, show_timeline
from labkit.widgets.timeline_page import write_timeline_page

__all__ = [
    "ExpertsBench",
    "KernelBench",
    "ParallelBench",
    "PipelineBench",
    "PrecisionBench",
    "StreamingBench",
    "Timeline",
    "TraceBench",
    "Workbench",
    "is_live",
    "show_timeline",
    "write_timeline_page",
]
