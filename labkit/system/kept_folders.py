"""Folders that are kept because making them anew takes long, within bounds of number, size and age."""

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
    """What may be kept in one place: the number of folders, their bytes in all, and the days that one may be unused."""

    folders: int = 100
    size_bytes: int = 8 << 30
    unused_days: int = 30


def used(folder: Path) -> None:
    """Notes that a kept folder was used now."""
    with suppress(OSError):  # of another user, or on a file system that is read only
        os.utime(folder)


def remove_old(parent: Path, bounds: Bounds, *, keep: Path) -> None:
    """Removes folders of `parent` until the others are within `bounds`, those first that were unused for the longest.

    `keep` stays whatever its size. Folders whose names begin with a dot, which somebody may be writing, stay too.
    """
    now, count, size = time.time(), 1, _size_bytes(keep)
    for when, folder in sorted(_dated(parent, keep), reverse=True):
        count, size = count + 1, size + _size_bytes(folder)
        if count > bounds.folders or size > bounds.size_bytes or now - when > bounds.unused_days * DAY_S:
            count, size = count - 1, size - _size_bytes(folder)
            shutil.rmtree(folder, ignore_errors=True)


def _dated(parent: Path, keep: Path) -> list[tuple[float, Path]]:
    """The folders but `keep`, with the time of their last use."""
    dated = []
    for folder in parent.glob("[!.]*"):
        with suppress(OSError):  # somebody else removed it
            if folder != keep and folder.is_dir():
                dated.append((folder.stat().st_mtime, folder))
    return dated


def _size_bytes(folder: Path) -> int:
    total = 0
    for file in folder.glob("**/*"):
        with suppress(OSError):
            total += file.stat().st_size
    return total
