"""The highest rate at which a machine's memory was read, kept in labkit's cache by machine and number of threads.

A probe takes a second in a new process. What only tells the share of the limit in passing takes the kept rate instead.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field, ValidationError

from labkit.statistics.kept_resolutions import Machine
from labkit.system.cache_root import cache_root
from labkit.system.errors import UserError
from labkit.system.json_file import read_json
from labkit.system.validation import Listed
from labkit.system.whole_file import write_whole

KEPT = "read-rates.json"
SCHEMA = 1
MORE = 1.01  # a rate that is higher by less is not written


class KeptRate(Listed):
    """The highest rate of some threads of a machine."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    machine: Machine
    threads: int
    gb_s: float = Field(gt=0)


def kept_rate_gb_s(threads: int, folder: Path | None = None) -> float | None:
    """GB/s of this machine with `threads` threads; None: not measured yet. folder: by default the cache's."""
    return next((kept.gb_s for kept in _read(_file(folder)) if _is_here(kept, threads)), None)


def keep_rate(gb_s: float, threads: int, folder: Path | None = None) -> None:
    """Keeps a measured rate if it is the highest one. Does nothing where the cache cannot be written."""
    file = _file(folder)
    kept = _read(file)
    if file is None or any(_is_here(rate, threads) and gb_s < rate.gb_s * MORE for rate in kept):
        return
    others = [rate for rate in kept if not _is_here(rate, threads)]
    rates = [*others, KeptRate(machine=Machine.here(), threads=threads, gb_s=gb_s)]
    with suppress(OSError, UserError):
        write_whole(file, json.dumps({"schema": SCHEMA, "rates": [rate.model_dump(mode="json") for rate in rates]}))


def _is_here(kept: KeptRate, threads: int) -> bool:
    return kept.threads == threads and kept.machine.is_same(Machine.here())


def _file(folder: Path | None) -> Path | None:
    folder = folder or cache_root()
    return None if folder is None else folder / KEPT


def _read(file: Path | None) -> list[KeptRate]:
    """The entries of a file that are complete; none of a file that is missing or damaged."""
    content: Any = None
    with suppress(OSError, ValueError):
        content = None if file is None else read_json(file, "measured rates of memory")
    match content:
        case {"schema": 1, "rates": list(entries)}:
            return [kept for entry in entries if (kept := _entry(entry)) is not None]
    return []


def _entry(entry: Any) -> KeptRate | None:
    try:
        return KeptRate.model_validate(entry)
    except ValidationError:
        return None
