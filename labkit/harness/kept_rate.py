"""The highest rate at which a machine's memory was read, kept in labkit's cache by machine and number of threads.

A probe takes a second in a new process. A conversation, which shows the share of the limit in passing, uses the kept
rate instead.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from pydantic import Field

from labkit.statistics.kept_records import KeptRecord, Machine, kept_file, read_kept, write_kept
from labkit.system.errors import UserError

KEPT, NAME = "read-rates.json", "rates"
MORE = 1.01  # a rate that is higher by less is not written


class KeptRate(KeptRecord):
    """The highest rate of some threads of a machine."""

    machine: Machine
    threads: int
    gb_s: float = Field(gt=0)

    def serves(self, machine: Machine, threads: int) -> bool:
        """Whether this is the rate of a machine with this number of threads."""
        return threads == self.threads and self.machine.is_same(machine)


def kept_rate_gb_s(threads: int, folder: Path | None = None) -> float | None:
    """GB/s of this machine with `threads` threads; None: not measured yet. folder: by default the cache's."""
    here, rates = Machine.here(), read_kept(kept_file(KEPT, folder), NAME, KeptRate)
    return next((kept.gb_s for kept in rates if kept.serves(here, threads)), None)


def keep_rate(gb_s: float, threads: int, folder: Path | None = None) -> None:
    """Keeps a measured rate if it is the highest one. Does nothing where the cache cannot be written."""
    file, here = kept_file(KEPT, folder), Machine.here()
    kept = read_kept(file, NAME, KeptRate)
    if file is None or any(rate.serves(here, threads) and gb_s < rate.gb_s * MORE for rate in kept):
        return
    rate = KeptRate(machine=here, threads=threads, gb_s=gb_s)
    with suppress(OSError, UserError):
        write_kept(file, NAME, rate, replaces=lambda kept: kept.serves(here, threads))
