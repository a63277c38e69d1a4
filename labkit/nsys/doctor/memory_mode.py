"""The mode of the memory: how fast it is read now, against the fastest rate seen on this machine.

The memory of a shared machine has a fast and a slow mode, which depend on the load of other guests. A mode lasts for
seconds or for hours, and only an earlier rate tells the modes apart. So the doctor keeps the fastest rate.
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

SLOW = 0.8  # share of the fastest rate below which memory is in a slow mode
STEADY = 0.75  # share of this check's highest rate; a lowest rate below it shows that the mode changes meanwhile
KEPT = "memory.json"
REPAIR = "compare figures of one run only, as labkit compare does; figures of other runs differ by as much"


def memory_mode(fact: Mapping[str, Any], folder: Path | None = None) -> DoctorCheck:
    """The check. `fact`: the inventory's, on memory. `folder`: keeps the fastest rate; by default the cache's."""
    rates: Sequence[float] = fact["gb_s"]
    now, lowest, highest = median(rates), min(rates), max(rates)
    file = None if (folder := folder or cache_root()) is None else folder / KEPT
    fastest, day = _fastest(file, cpu_name(), highest)
    finding = f"threads: {fact['threads']}, they read {now:.0f} GB/s now ({lowest:.0f} to {highest:.0f})"
    if lowest < STEADY * highest:
        return DoctorCheck("memory", Status.WARN, f"{finding}: its mode changes within seconds", REPAIR)
    if now < SLOW * fastest:
        finding += f", {now / fastest:.0%} of the {fastest:.0f} of {day}: the slow mode"
        return DoctorCheck("memory", Status.WARN, finding, REPAIR)
    if day is None:
        return DoctorCheck("memory", Status.OK, f"{finding}; the first check, with no earlier rate to compare with")
    return DoctorCheck("memory", Status.OK, f"{finding}: the fastest mode seen here")


def _fastest(file: Path | None, cpu: str, highest: float) -> tuple[float, str | None]:
    """The fastest rate of a processor of this name, this check included, and its day; None: this is the first check.

    If the rate cannot be kept, each check is the first.
    """
    rates: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        if file is not None and isinstance(read := read_json(file, "the fastest memory rates"), dict):
            rates = read
    first = True
    match rates.get(cpu):
        case [float(rate), str(day)]:
            if rate >= highest:
                return rate, day
            first = False
    today = date.today().isoformat()
    with suppress(OSError):
        if file is not None:
            write_whole(file, json.dumps(rates | {cpu: [float(highest), today]}))
    return float(highest), None if first else today
