"""Files that are there whole or not at all."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """A path beside `target` to write to: it becomes `target` at the end, and is removed where anything goes wrong.

    A process that is killed leaves the file behind. The file is locked while it is written, so that
    `remove_unfinished` can tell.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    path, lock = _locked_file(target)
    try:
        yield path
        path.chmod(0o644)  # temporary files are their owner's alone
        path.replace(target)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(lock)


def write_whole(target: Path, text: str) -> None:
    """Write `text` to `target`: nobody ever sees half of it."""
    with whole_file(target) as path:
        path.write_text(text, encoding="utf-8")


def remove_unfinished(folder: Path, suffix: str) -> None:
    """Removes the files with this suffix that `whole_file` was writing in a folder when its process was killed.

    A file that a living process writes is locked, and stays; so does every file where the file system has no locks.
    """
    for path in folder.glob(f".*.tmp{suffix}"):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)


def _locked_file(target: Path) -> tuple[Path, int]:
    """An empty file beside `target`, and a descriptor that holds its lock."""
    while True:
        descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=".", suffix=f".tmp{target.suffix}")
        with suppress(OSError):  # without locks nothing is ever removed as unfinished
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink:  # else it was taken for a dead one before it was locked
            return Path(name), descriptor
        os.close(descriptor)
