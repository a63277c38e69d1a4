"""Folders that are kept because making them again is slow, within bounds on their number, size and age."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

DAY_S = 86_400


@dataclass(frozen=True)
class Bounds:
    """Bounds on the kept folders of one parent."""

    folders: int = 100
    size_bytes: int = 8 << 30  # of all folders together
    unused_days: int = 30  # of one folder


def used(folder: Path) -> None:
    """Records that a kept folder was used now."""
    with suppress(OSError):  # it belongs to another user, or the file system is read-only
        os.utime(folder)


def remove_old(parent: Path, bounds: Bounds, *, keep: Path) -> None:
    """Removes folders of `parent`, the longest unused first, until the rest is within `bounds`.

    `keep` stays, however large it is. Folders whose names begin with a dot stay too: somebody may be writing them.
    """
    now, count, size = time.time(), 1, _size_bytes(keep)
    for when, folder in sorted(_dated(parent, keep), reverse=True):
        count, size = count + 1, size + _size_bytes(folder)
        if count > bounds.folders or size > bounds.size_bytes or now - when > bounds.unused_days * DAY_S:
            count, size = count - 1, size - _size_bytes(folder)
            shutil.rmtree(folder, ignore_errors=True)


def _dated(parent: Path, keep: Path) -> list[tuple[float, Path]]:
    """The folders except `keep`, each with the time of its last use."""
    dated = []
    for folder in parent.glob("[!.]*"):
        with suppress(OSError):  # another process removed it
            if folder != keep and folder.is_dir():
                dated.append((folder.stat().st_mtime, folder))
    return dated


def _size_bytes(folder: Path) -> int:
    total = 0
    for file in folder.glob("**/*"):
        with suppress(OSError):
            total += file.stat().st_size
    return total
