"""Which mode memory is in: how fast it is read now, beside the fastest that this machine was seen to read.

The memory of a shared machine has a fast and a slow mode, which depend on what other guests ask of it. One lasts for
seconds or for hours, and nothing tells which it is but an earlier reading. So the doctor keeps the fastest one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from labkit.nsys.doctor.check import DoctorCheck, Status
from labkit.system.cache_root import cache_root
from labkit.system.json_file import read_json
from labkit.system.processor import cpu_name
from labkit.system.whole_file import write_whole

SLOW = 0.8  # of the fastest rate: below it memory is in a slow mode
STEADY = 0.75  # of the fastest pass in this look: where a slower one falls below it, the mode has changed meanwhile
KEPT = "memory.json"
REPAIR = "compare figures of one run only, as labkit compare does; those of other runs differ by as much"


def memory_mode(fact: Mapping[str, Any], folder: Path | None = None) -> DoctorCheck:
    """`fact`: what the inventory says of memory. `folder`: where the fastest rate is kept, by default the cache's."""
    rates: Sequence[float] = fact["gb_s"]
    now, lowest, highest = median(rates), min(rates), max(rates)
    kept = None if (folder := folder or cache_root()) is None else folder / KEPT
    fastest, day = _fastest(kept, cpu_name(), highest)
    finding = f"threads: {fact['threads']}, they read {now:.0f} GB/s now ({lowest:.0f} to {highest:.0f})"
    if lowest < STEADY * highest:
        return DoctorCheck("memory", Status.WARN, f"{finding}: its mode changes within seconds", REPAIR)
    if now < SLOW * fastest:
        finding += f", {now / fastest:.0%} of the {fastest:.0f} of {day}: the slow mode"
        return DoctorCheck("memory", Status.WARN, finding, REPAIR)
    if day is None:
        return DoctorCheck("memory", Status.OK, f"{finding}; the first look, with none to compare it to")
    return DoctorCheck("memory", Status.OK, f"{finding}: the fastest mode seen here")


def _fastest(kept: Path | None, cpu: str, highest: float) -> tuple[float, str | None]:
    """The fastest rate that a processor of this name has reached, this time included, and the day; None: never before.
    Where it cannot be kept, each look is the first.
    """
    found: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        if kept is not None and isinstance(read := read_json(kept, "the fastest memory rates"), dict):
            found = read
    first = True
    match found.get(cpu):
        case [float(rate), str(day)]:
            if rate >= highest:
                return rate, day
            first = False
    today = date.today().isoformat()
    with suppress(OSError):
        if kept is not None:
            write_whole(kept, json.dumps(found | {cpu: [float(highest), today]}))
    return float(highest), None if first else today
