"""Measured resolutions, kept in labkit's cache by machine, number of threads and size of the model.

The doctor shows them without loading torch. A home folder may serve several machines, so each figure names its own.
"""

from __future__ import annotations

import math
from datetime import date
from pathlib import Path
from typing import Any

from pydantic import Field

from labkit.statistics.kept_records import KeptRecord, Machine, kept_file, read_kept, write_kept
from labkit.statistics.resolution import MINUTE_S, Resolution, TellsApart
from labkit.system.errors import UserError
from labkit.system.shown import shown
from labkit.system.whole_file import check_output_file

KEPT, NAME = "resolutions.json", "resolutions"
SIZES_APART = 4  # size of a class of models / size of the next smaller class
LARGEST = 10.0  # logarithm of a ratio that no machine shows


class KeptResolution(KeptRecord):
    """A measured resolution, and what it was measured with."""

    machine: Machine
    threads: int
    model: str
    dtype: str
    weight_mb: float = Field(gt=0)  # read in each step
    scatter: float = Field(ge=0, le=LARGEST)  # this and the next two: as in `Resolution`
    bias: float = Field(ge=0, le=LARGEST)
    epoch_s: float = Field(gt=0)
    epochs: int
    measured: date

    @property
    def resolution(self) -> Resolution:
        return Resolution(self.scatter, self.bias, self.epoch_s)

    @property
    def tells_apart(self) -> TellsApart:
        """The smallest difference that a minute tells apart."""
        return self.resolution.after(MINUTE_S)

    def serves(self, weight_mb: float, threads: int) -> bool:
        """Whether a model of this size, with this number of threads, has this resolution."""
        return threads == self.threads and size_class(weight_mb) == size_class(self.weight_mb)

    def is_as(self, other: KeptResolution) -> bool:
        """Whether both are of one machine, size of models and number of threads."""
        return self.machine.is_same(other.machine) and self.serves(other.weight_mb, other.threads)

    def __str__(self) -> str:
        threads = f"{self.threads} thread{'' if self.threads == 1 else 's'}"
        of = shown(f"{self.model} {self.dtype}")
        size = f"{self.weight_mb:,.0f}" if self.weight_mb >= 10 else f"{self.weight_mb:.1f}"
        return f"{self.tells_apart}, for models around {size} MB ({of}) on {threads}, {self.measured}"

    def as_dict(self) -> dict[str, Any]:
        """The fields, with the smallest difference that a minute tells apart."""
        tells = self.tells_apart
        return self.model_dump(mode="json") | {"difference": tells.difference, "seconds": tells.seconds}


def size_class(weight_mb: float) -> int:
    """The class of a model's size: its power of 4 in MB, rounded. Models of 128 to 512 MB are in one class."""
    return round(math.log(weight_mb, SIZES_APART))


def kept_resolutions(folder: Path | None = None) -> list[KeptResolution]:
    """The resolutions of this machine, from the smallest model to the largest. `folder`: by default the cache's.

    Damaged entries, and a file that cannot be read, count as not there.
    """
    here = Machine.here()
    kept = [entry for entry in read_kept(kept_file(KEPT, folder), NAME, KeptResolution) if entry.machine.is_same(here)]
    return sorted(kept, key=lambda entry: (entry.weight_mb, entry.threads))


def resolution_for(weight_mb: float, threads: int, folder: Path | None = None) -> Resolution | None:
    """This machine's resolution for models of this size, with this number of threads; None: not measured."""
    kept = [entry for entry in kept_resolutions(folder) if entry.serves(weight_mb, threads)]
    return kept[0].resolution if kept else None


def keep_resolution(resolution: KeptResolution, folder: Path | None = None) -> Path:
    """Keeps a resolution instead of earlier ones of this machine, size and number of threads. Returns the file.

    UserError: the user has no home folder. OSError, which names the file: it cannot be written.
    """
    file = check_can_keep(folder)
    write_kept(file, NAME, resolution, replaces=resolution.is_as)
    return file


def check_can_keep(folder: Path | None = None) -> Path:
    """The file of all resolutions, checked for being writable. Errors: as `keep_resolution`."""
    file = kept_file(KEPT, folder)
    if file is None:
        raise UserError("got no home folder, expected one to keep the resolution in; name a folder with LABKIT_CACHE")
    check_output_file(file)
    return file
