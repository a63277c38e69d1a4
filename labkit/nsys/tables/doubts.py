"""Implausible data in a trace: impossible times, and calls that launched more kernels than one call can."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from labkit.nsys.analysis.launches import shared_launches
from labkit.nsys.analysis.rank_numbers import rank_word
from labkit.nsys.tables.kernel_names import brief, cut
from labkit.nsys.tables.places import devices, on_device
from labkit.nsys.trace import Trace

ROUNDED_NS = 1_000  # to which old profilers round times
LONGER, MOST_OF_SPAN, LONGEST_NS = 100, 0.5, 3_600_000_000_000
FEW = 20  # at most one in 20 operations is an outlier, or a single one


def doubts(trace: Trace) -> Iterator[str]:
    """One line for each kind of doubt."""
    yield from _too_long(trace)
    if overlapping := _overlapping(trace):
        yield (
            f"{overlapping:,} of {len(trace.operations):,} operations begin before the one before them on their stream "
            "has ended. Programmatic dependent launch does this; without it their times are damaged, and so are busy "
            "and idle time"
        )
    if shared := int(shared_launches(trace).sum()):
        yield (
            f"{shared:,} operations share the correlation of a call that launches one kernel: which call and which "
            "operator launched them is not known"
        )


def _too_long(trace: Trace) -> Iterator[str]:
    """Few operations that take most of the span of their device, and far longer than all others."""
    operations = trace.operations
    length = (operations["end_ns"] - operations["start_ns"]).to_numpy()
    places = devices(trace)
    for place in places.itertuples(index=False):
        rows = np.flatnonzero(on_device(operations, place.process, place.device))
        span = float(operations["end_ns"].to_numpy()[rows].max() - operations["start_ns"].to_numpy()[rows].min())
        lengths = np.append(np.sort(length[rows].astype(float))[::-1], 0)
        if count := _outliers(lengths, span):
            name = cut(brief(str(operations["name"].iloc[rows[np.argmax(length[rows])]])), 60)
            owner = f" of {rank_word(trace)} {place.rank}'s GPU {place.device}" if len(places) > 1 else ""
            take = "takes" if count == 1 else f"and {count - 1:,} more each take at least"
            yield (
                f"{name} {take} {lengths[count - 1] / 1e6:,.3f} of the {span / 1e6:,.3f} ms{owner}, and no other "
                f"operation longer than {lengths[count] / 1e6:,.3f} ms: if {'its' if count == 1 else 'their'} times "
                "are damaged, so are busy time and shares"
            )


def _outliers(lengths: NDArray[np.float64], span: float) -> int:
    """How many operations are far longer than all others. `lengths`: of a device's operations, the longest first."""
    total = len(lengths) - 1
    most = max(1, total // FEW) if total > 2 else 0
    far = lengths[:most] > LONGER * np.maximum(lengths[1 : most + 1], 1)
    far &= np.cumsum(lengths[:most]) > MOST_OF_SPAN * span
    return max(int((np.flatnonzero(far) + 1).max(initial=0)), int((lengths > LONGEST_NS).sum()))


def _overlapping(trace: Trace) -> int:
    """The number of operations that begin before the end of an earlier one of their stream, by more than rounding.

    Operations of CUDA graphs are left out: branches of a graph run at the same time under one stream.
    """
    rows = trace.operations[((trace.operations["graph_node"] == 0) & (trace.operations["kind"] != "graph")).to_numpy()]
    stream = rows.groupby(["process", "device", "stream"]).ngroup().to_numpy()
    order = np.lexsort((rows["start_ns"].to_numpy(), stream))
    start, end, stream = rows["start_ns"].to_numpy()[order], rows["end_ns"].to_numpy()[order], stream[order]
    reached = pd.Series(end).groupby(stream).cummax().to_numpy()
    return int(((stream[1:] == stream[:-1]) & (reached[:-1] - start[1:] > ROUNDED_NS) & (end[1:] > start[1:])).sum())
