"""Controls for live notebooks. In a batch run the same calls show static output."""

from labkit.widgets.kernel_bench import KernelBench
from labkit.widgets.live import is_live
from labkit.widgets.parallel_bench import ParallelBench
from labkit.widgets.pipeline_bench import PipelineBench
from labkit.widgets.precision_bench import PrecisionBench
from labkit.widgets.streaming_bench import StreamingBench
from labkit.widgets.timeline import Timeline, show_timeline
from labkit.widgets.timeline_page import write_timeline_page
from labkit.widgets.trace_bench import TraceBench
from labkit.widgets.workbench import Workbench

__all__ = [
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
