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

# Each part is loaded on first use: a profiled process imports this package, and should not pay for frames.
__all__, __getattr__, __dir__ = lazy_parts(__name__)
