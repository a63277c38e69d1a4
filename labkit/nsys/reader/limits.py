"""Limits of the numbers in a file: a damaged or hand-made file is refused before its numbers overflow a sum."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from labkit.nsys.trace import TraceError

LATEST_NS = 1 << 62  # 146 years: longer than any capture, and two such times can still be added
GREATEST = (1 << 31) - 1  # of columns of 32 bits: rank, device, number of registers, bytes of shared memory


def rank_number(digits: str, where: str) -> int:
    """The rank in `digits`. `where` names its place. Raises TraceError for a rank that a trace cannot hold."""
    if len(digits.lstrip("0")) > len(str(GREATEST)) or int(digits) > GREATEST:
        shown = f"{digits[:20]}..." if len(digits) > 20 else digits
        raise TraceError(f"got rank {shown} in {where}; expected at most {GREATEST}: give it its rank's number")
    return int(digits)


def check_size(sizes: NDArray[np.int64], where: str) -> None:
    """Raises TraceError for a number larger than a trace can hold."""
    if len(sizes) and int(np.abs(sizes.astype(float)).max()) > GREATEST:
        raise TraceError(
            f"got a number beyond {GREATEST} as {where}: the file is damaged, or was not written by a profiler; export "
            "it again"
        )


def check_times(times_ns: NDArray[np.int64] | int, where: str) -> None:
    """Raises TraceError for a time outside of any capture."""
    low, high = int(np.min(times_ns, initial=0)), int(np.max(times_ns, initial=0))
    farthest = high if high > -low else low
    if abs(farthest) >= LATEST_NS:
        raise TraceError(
            f"got a time of {farthest} ns in {where}, expected less than {LATEST_NS} ns (146 years): the file is "
            "damaged, or was not written by a profiler; record again"
        )
