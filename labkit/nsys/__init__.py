"""Nsight Systems: capture, read, project, explain. Needs the names of the stages, and never torch."""

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
    from labkit.nsys.timeline.export import write_chrome
    from labkit.nsys.trace import Trace, TraceError

__all__ = [
    "Capture",
    "CaptureError",
    "Trace",
    "TraceError",
    "Window",
    "attribute",
    "collectives",
    "doctor_table",
    "examine",
    "explain",
    "kernel_summary",
    "profile",
    "project",
    "projection_summary",
    "read",
    "scrub",
    "stage_table",
    "write_chrome",
]

_HOME = {
    "Capture": "labkit.nsys.capture.result",
    "CaptureError": "labkit.nsys.capture.result",
    "Trace": "labkit.nsys.trace",
    "TraceError": "labkit.nsys.trace",
    "Window": "labkit.nsys.capture.command",
    "attribute": "labkit.nsys.analysis.attribution",
    "collectives": "labkit.nsys.analysis.collectives",
    "doctor_table": "labkit.nsys.doctor.examination",
    "examine": "labkit.nsys.doctor.examination",
    "explain": "labkit.nsys.analysis.difference",
    "kernel_summary": "labkit.nsys.analysis.projection",
    "profile": "labkit.nsys.capture.profile",
    "project": "labkit.nsys.analysis.projection",
    "projection_summary": "labkit.nsys.analysis.projection",
    "read": "labkit.nsys.reader.reading",
    "scrub": "labkit.nsys.capture.scrubbing",
    "stage_table": "labkit.nsys.analysis.stage_table",
    "write_chrome": "labkit.nsys.timeline.export",
}

# Each part is loaded on first use: a profiled process imports this package, and should not pay for frames.
__getattr__, __dir__ = lazy_parts(__name__, _HOME)
