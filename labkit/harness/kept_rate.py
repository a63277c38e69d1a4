"""The highest rate at which a machine's memory was read, kept in labkit's cache by machine and number of threads.

A probe takes a second in a new process. What only tells the share of the limit in passing takes the kept rate instead.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from pydantic import ConfigDict, Field

from labkit.statistics.kept_records import read_kept, write_kept
from labkit.statistics.kept_resolutions import Machine
from labkit.system.cache_root import cache_root
from labkit.system.errors import UserError
from labkit.system.validation import Listed

KEPT, NAME = "read-rates.json", "rates"
MORE = 1.01  # a rate that is higher by less is not written


class KeptRate(Listed):
    """The highest rate of some threads of a machine."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    machine: Machine
    threads: int
    gb_s: float = Field(gt=0)

    def serves(self, machine: Machine, threads: int) -> bool:
        """Whether this is the rate of a machine with this number of threads."""
        return threads == self.threads and self.machine.is_same(machine)


def kept_rate_gb_s(threads: int, folder: Path | None = None) -> float | None:
    """GB/s of this machine with `threads` threads; None: not measured yet. folder: by default the cache's."""
    here = Machine.here()
    return next((kept.gb_s for kept in _read(_file(folder)) if kept.serves(here, threads)), None)


def keep_rate(gb_s: float, threads: int, folder: Path | None = None) -> None:
    """Keeps a measured rate if it is the highest one. Does nothing where the cache cannot be written."""
    file, here = _file(folder), Machine.here()
    kept = _read(file)
    if file is None or any(rate.serves(here, threads) and gb_s < rate.gb_s * MORE for rate in kept):
        return
    others = [rate for rate in kept if not rate.serves(here, threads)]
    with suppress(OSError, UserError):
        write_kept(file, NAME, [*others, KeptRate(machine=here, threads=threads, gb_s=gb_s)])


def _file(folder: Path | None) -> Path | None:
    folder = folder or cache_root()
    return None if folder is None else folder / KEPT


def _read(file: Path | None) -> list[KeptRate]:
    return read_kept(file, NAME, KeptRate)
