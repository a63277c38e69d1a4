"""Nsight Systems and torch.profiler: capture, read, tabulate, project and explain traces.

The package imports the names of the stages, and never torch.
"""

from typing import TYPE_CHECKING

from labkit.system.lazy import lazy_parts

if TYPE_CHECKING:
    from labkit.nsys.analysis.attribution import attribute
    from labkit.nsys.analysis.collectives import collectives
    from labkit.nsys.analysis.difference import explain
    from labkit.nsys.analysis.projection import kernel_summary, project, projection_summary
    from labkit.nsys.analysis.stage_table import stage_table
    from labkit.nsys.capture.command import Window
    from labkit.nsys.capture.profile import profile
    from labkit.nsys.capture.result import Capture, CaptureError
    from labkit.nsys.capture.scrubbing import scrub
    from labkit.nsys.doctor.examination import doctor_table, examine
    from labkit.nsys.reader.reading import read
    from labkit.nsys.tables.budget import budget
    from labkit.nsys.tables.compare import TraceDifference, compare_traces
    from labkit.nsys.tables.gaps import gaps, idle_by_cause, short_kernels
    from labkit.nsys.tables.losses import losses
    from labkit.nsys.tables.operations import calls, copies, kernels
    from labkit.nsys.tables.operators import categories, operators
    from labkit.nsys.tables.ranges import ranges
    from labkit.nsys.tables.rank_waits import RankWaits, on_one_clock, rank_waits
    from labkit.nsys.tables.replay import write_replay
    from labkit.nsys.tables.selection import Selection
    from labkit.nsys.tables.summary import TraceSummary, summarise, summary_of
    from labkit.nsys.tables.trace_tables import TraceTables, trace_tables
    from labkit.nsys.timeline.export import write_chrome
    from labkit.nsys.trace import Trace, TraceError

__all__ = [
    "Capture",
    "CaptureError",
    "RankWaits",
    "Selection",
    "Trace",
    "TraceDifference",
    "TraceError",
    "TraceSummary",
    "TraceTables",
    "Window",
    "attribute",
    "budget",
    "calls",
    "categories",
    "collectives",
    "compare_traces",
    "copies",
    "doctor_table",
    "examine",
    "explain",
    "gaps",
    "idle_by_cause",
    "kernel_summary",
    "kernels",
    "losses",
    "on_one_clock",
    "operators",
    "profile",
    "project",
    "projection_summary",
    "ranges",
    "rank_waits",
    "read",
    "scrub",
    "short_kernels",
    "stage_table",
    "summarise",
    "summary_of",
    "trace_tables",
    "write_chrome",
    "write_replay",
]

_HOME = {
    "Capture": "labkit.nsys.capture.result",
    "CaptureError": "labkit.nsys.capture.result",
    "RankWaits": "labkit.nsys.tables.rank_waits",
    "Selection": "labkit.nsys.tables.selection",
    "Trace": "labkit.nsys.trace",
    "TraceDifference": "labkit.nsys.tables.compare",
    "TraceError": "labkit.nsys.trace",
    "TraceSummary": "labkit.nsys.tables.summary",
    "TraceTables": "labkit.nsys.tables.trace_tables",
    "Window": "labkit.nsys.capture.command",
    "attribute": "labkit.nsys.analysis.attribution",
    "budget": "labkit.nsys.tables.budget",
    "calls": "labkit.nsys.tables.operations",
    "categories": "labkit.nsys.tables.operators",
    "collectives": "labkit.nsys.analysis.collectives",
    "compare_traces": "labkit.nsys.tables.compare",
    "copies": "labkit.nsys.tables.operations",
    "doctor_table": "labkit.nsys.doctor.examination",
    "examine": "labkit.nsys.doctor.examination",
    "explain": "labkit.nsys.analysis.difference",
    "gaps": "labkit.nsys.tables.gaps",
    "idle_by_cause": "labkit.nsys.tables.gaps",
    "kernel_summary": "labkit.nsys.analysis.projection",
    "kernels": "labkit.nsys.tables.operations",
    "losses": "labkit.nsys.tables.losses",
    "on_one_clock": "labkit.nsys.tables.rank_waits",
    "operators": "labkit.nsys.tables.operators",
    "profile": "labkit.nsys.capture.profile",
    "project": "labkit.nsys.analysis.projection",
    "projection_summary": "labkit.nsys.analysis.projection",
    "ranges": "labkit.nsys.tables.ranges",
    "rank_waits": "labkit.nsys.tables.rank_waits",
    "read": "labkit.nsys.reader.reading",
    "scrub": "labkit.nsys.capture.scrubbing",
    "short_kernels": "labkit.nsys.tables.gaps",
    "stage_table": "labkit.nsys.analysis.stage_table",
    "summarise": "labkit.nsys.tables.summary",
    "summary_of": "labkit.nsys.tables.summary",
    "trace_tables": "labkit.nsys.tables.trace_tables",
    "write_chrome": "labkit.nsys.timeline.export",
    "write_replay": "labkit.nsys.tables.replay",
}

# Each part is loaded on first use: a profiled process imports this package, and should not pay for frames.
__getattr__, __dir__ = lazy_parts(__name__, _HOME)
