"""Temporary folders that their owner locks, so that the folders of a killed process can be recognised and removed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def owned_folder(
    prefix: str, parent: Path | None = None, *, before_removal: Callable[[Path], object] | None = None
) -> Iterator[Path]:
    """A new folder in `parent` (default: the folder for temporary files) that is removed at the end.

    First removes folders with the same prefix and user whose owner has died, and calls `before_removal` with each. The
    system releases the lock of an owner that ends for any reason, so a folder in use is never removed. On a file system
    without locks only the new folder itself is removed.
    """
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    remove_abandoned(prefix, parent, before_removal)
    # The folder gets its prefix once it is locked: until then nobody can take it for abandoned.
    new = Path(tempfile.mkdtemp(prefix=".labkit-new-", dir=parent))
    lock = os.open(new, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        folder = new.rename(parent / f"{prefix}{new.name.removeprefix('.labkit-new-')}")
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def remove_abandoned(prefix: str, parent: Path, before_removal: Callable[[Path], object] | None = None) -> None:
    """Removes the folders with this prefix in `parent` that belong to this user and that no process has locked."""
    for folder in sorted(parent.glob(f"{prefix}*")):
        with suppress(OSError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid != os.getuid():
                    continue
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if before_removal is not None:
                    before_removal(folder)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
