"""The files that a side reads while it runs: made cold before, and the rate of the disk that they are on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from labkit.harness.disk import BLOCK, read_rate_gb_s
from labkit.system.page_cache import make_cold

PROBE_S = 0.2


@dataclass(frozen=True)
class ReadFiles:
    """Each file once, whatever names it has."""

    paths: tuple[Path, ...] = ()

    @classmethod
    def below(cls, folder: str | None) -> ReadFiles:
        """All files of a folder; none where there is no folder."""
        if folder is None:
            return cls()
        found = {path.stat().st_ino: path for path in sorted(Path(folder).rglob("*")) if path.is_file()}
        return cls(tuple(found.values()))

    def make_cold(self) -> int | None:
        """The bytes of all files that are in the page cache afterwards; None where the system does not tell, and
        where there are no files.
        """
        left = [make_cold(path) for path in self.paths]
        known = [size for size in left if size is not None]
        return sum(known) if known and len(known) == len(left) else None

    def rate_gb_s(self) -> float | None:
        """The rate at which the largest of them is read past the page cache, now; None where all are too short."""
        largest = max(self.paths, key=lambda path: path.stat().st_size, default=None)
        if largest is None or largest.stat().st_size < BLOCK:
            return None
        return read_rate_gb_s(largest, PROBE_S)
