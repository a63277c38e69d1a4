"""Measure: raw samples on honest clocks, beside the machine's limit, with intervals instead of bare speedups."""

from labkit.harness.compare.interleave import Progress
from labkit.harness.compare.sides import WorkerError
from labkit.harness.latency import measure_latency
from labkit.harness.records import Case, Comparison, Measurement, Run
from labkit.harness.results import load_records, load_results, save
from labkit.statistics import Ratio, Verdict

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
