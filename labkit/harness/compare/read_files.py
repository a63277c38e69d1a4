"""Files that a side reads while it runs: making them cold, and the rate of their disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from labkit.harness.disk import BLOCK, read_rate_gb_s
from labkit.system.page_cache import make_cold

PROBE_S = 0.2


@dataclass(frozen=True)
class ReadFiles:
    """Files of a side, each once, even if it has several names."""

    paths: tuple[Path, ...] = ()

    @classmethod
    def below(cls, folder: str | None) -> ReadFiles:
        """All files below a folder; no files for None."""
        if folder is None:
            return cls()
        files = {path.stat().st_ino: path for path in sorted(Path(folder).rglob("*")) if path.is_file()}
        return cls(tuple(files.values()))

    def make_cold(self) -> int | None:
        """Removes the files from the page cache. Returns their bytes that are still in it; None where the system does
        not report that, or without files.
        """
        cached = [make_cold(path) for path in self.paths]
        known = [size for size in cached if size is not None]
        return sum(known) if known and len(known) == len(cached) else None

    def rate_gb_s(self) -> float | None:
        """The present rate at which the largest file is read past the page cache; None where all are too short."""
        largest = max(self.paths, key=lambda path: path.stat().st_size, default=None)
        if largest is None or largest.stat().st_size < BLOCK:
            return None
        return read_rate_gb_s(largest, PROBE_S)
