"""Folders for results. They are checked before the work begins, since the work may take hours."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path

from labkit.system.asked_from import setting
from labkit.system.errors import UserError
from labkit.system.home import expanded

COPIES = ".labkit-copies.json"  # marks a folder with copies of the notebooks
ROOM_BYTES = 16 << 20  # for the records of a run and the files next to them
REMEDIES = {
    errno.ENOSPC: "make room there, or name a folder on another disk",
    errno.EDQUOT: "make room there, or name a folder on another disk",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f), or name a folder on a file system with larger files",
    errno.EROFS: "the file system is read-only; name another folder",
    errno.EACCES: "name a folder that you may write to, or change its permissions",
    errno.EPERM: "name a folder that you may write to, or change its permissions",
    errno.EEXIST: "there is a file of that name; name another folder, or move the file",
    errno.ENOTDIR: "a part of the path is a file; name another folder",
}


class RunsFolder(os.PathLike[str]):
    """The default folder for results: `runs` in the current folder. Kernels of copied notebooks start in the folder of
    the copies, and use the `runs` of the copies instead. The folder is looked up at every use.
    """

    def __fspath__(self) -> str:
        current = Path.cwd()
        copies = next((folder for folder in (current, *current.parents) if (folder / COPIES).is_file()), None)
        return "runs" if copies is None else str(runs_of(copies))

    def __str__(self) -> str:
        return "runs"

    __repr__ = __str__


RUNS = RunsFolder()


def runs_of(copies: Path) -> Path:
    """The results folder of a folder of copies: the `runs` that contains it, else a `runs` inside it."""
    return copies.parent if copies.parent.name == str(RUNS) else copies / str(RUNS)


def check_output_folder(
    folder: str | os.PathLike[str], *, room_bytes: int = ROOM_BYTES, what: str = "results", option: str = ""
) -> Path:
    """Makes the folder if needed, checks that it is writable and has room for `what`, and returns it.

    option: the setting that named the folder, by default the parameter output. UserError names the obstacle.
    """
    path, option = expanded(folder), option or setting("output")
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path, prefix=".labkit-"):
            free = shutil.disk_usage(path).free
    except OSError as error:
        raise UserError(f"{what} cannot be written to the folder {path}: {reason(error)} ({option})") from None
    if free < room_bytes:
        raise UserError(
            f"{what} cannot be written to the folder {path}: it has {free / 1e6:.1f} MB left, expected "
            f"{room_bytes / 1e6:.0f} MB at least; {REMEDIES[errno.ENOSPC]} ({option})"
        )
    return path


def reason(error: OSError) -> str:
    """The system's message, and the remedy if one is known."""
    message = os.strerror(error.errno) if error.errno else str(error)
    remedy = REMEDIES.get(error.errno or 0)
    return f"{message}; {remedy}" if remedy else message
