"""Figures from raw samples, with their intervals and a grade of trust."""

from labkit.statistics.ratios import (
    CONFIDENCE,
    INDIFFERENCE,
    LARGEST_SAME,
    RESAMPLES,
    Ratio,
    Verdict,
    noise_floor,
    ratio,
    unpaired_ratio,
)
from labkit.statistics.summaries import (
    OUTLIER_SAMPLES,
    P95_SAMPLES,
    Mean,
    Summary,
    first_is_slow,
    mean_of_groups,
    outliers,
    remarks,
    summarise,
)
from labkit.statistics.trust import ShareOfLimit, Trust, grade, taken_cores

__all__ = [
    "CONFIDENCE",
    "INDIFFERENCE",
    "LARGEST_SAME",
    "OUTLIER_SAMPLES",
    "P95_SAMPLES",
    "RESAMPLES",
    "Mean",
    "Ratio",
    "ShareOfLimit",
    "Summary",
    "Trust",
    "Verdict",
    "first_is_slow",
    "grade",
    "mean_of_groups",
    "noise_floor",
    "outliers",
    "ratio",
    "remarks",
    "summarise",
    "taken_cores",
    "unpaired_ratio",
]
