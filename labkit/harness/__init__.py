"""Measure: raw samples on honest clocks, beside the machine's limit, with intervals instead of bare speedups."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labkit.harness.compare.sides import WorkerError
    from labkit.harness.comparison import Comparison
    from labkit.harness.latency import measure_latency
    from labkit.harness.records import Case, Measurement, Run
    from labkit.harness.results import load_records, load_results, save
    from labkit.statistics import Ratio, Verdict
    from labkit.system.progress import Progress

__all__ = [
    "Case",
    "Comparison",
    "Measurement",
    "Progress",
    "Ratio",
    "Run",
    "Verdict",
    "WorkerError",
    "load_records",
    "load_results",
    "measure_latency",
    "save",
]

_HOME = {
    "Case": "labkit.harness.records",
    "Comparison": "labkit.harness.comparison",
    "Measurement": "labkit.harness.records",
    "Progress": "labkit.system.progress",
    "Ratio": "labkit.statistics",
    "Run": "labkit.harness.records",
    "Verdict": "labkit.statistics",
    "WorkerError": "labkit.harness.compare.sides",
    "load_records": "labkit.harness.results",
    "load_results": "labkit.harness.results",
    "measure_latency": "labkit.harness.latency",
    "save": "labkit.harness.results",
}


def __getattr__(name: str) -> Any:
    """Loads each part on first use: figures take the names of a region's sides from here, and need no torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'labkit.harness' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
