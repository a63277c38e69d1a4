"""Nsight Systems: capture, read, project, explain. Needs the names of the stages, and never torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
    "Capture": "capture.result",
    "CaptureError": "capture.result",
    "Trace": "trace",
    "TraceError": "trace",
    "Window": "capture.command",
    "attribute": "analysis.attribution",
    "collectives": "analysis.collectives",
    "doctor_table": "doctor.examination",
    "examine": "doctor.examination",
    "explain": "analysis.difference",
    "kernel_summary": "analysis.projection",
    "profile": "capture.profile",
    "project": "analysis.projection",
    "projection_summary": "analysis.projection",
    "read": "reader.reading",
    "scrub": "capture.scrubbing",
    "stage_table": "analysis.stage_table",
    "write_chrome": "timeline.export",
}


def __getattr__(name: str) -> Any:
    """Loads each part on first use: a profiled process imports this package, and should not pay for frames."""
    if name not in _HOME:
        raise AttributeError(f"module 'labkit.nsys' has no attribute {name!r}")
    return getattr(import_module(f"labkit.nsys.{_HOME[name]}"), name)
