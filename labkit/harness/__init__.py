"""Measurements: raw samples on honest clocks, with the machine's limit, and intervals instead of bare speedups."""

from typing import TYPE_CHECKING

from labkit.system.lazy import lazy_parts

if TYPE_CHECKING:
    from labkit.harness.compare.side_process import WorkerError
    from labkit.harness.comparison import Comparison
    from labkit.harness.diff.changes import RecordsDiff
    from labkit.harness.diff.diff_records import diff_records
    from labkit.harness.latency import measure_latency
    from labkit.harness.records import Measurement
    from labkit.harness.results import load_records, load_results, save
    from labkit.harness.runs import Case, Run
    from labkit.statistics import Ratio, Verdict
    from labkit.system.progress import Progress

# Each part is loaded on first use: figures import the names of a region's sides from this package, without torch.
__all__, __getattr__, __dir__ = lazy_parts(__name__)
