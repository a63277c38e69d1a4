"""Folders that results go to: looked at before the work begins, since it may take hours."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path

from labkit.system.asked_from import setting
from labkit.system.errors import UserError

COPIES = ".labkit-copies.json"  # marks a folder as one of copies of the notebooks
ROOM_BYTES = 16 << 20  # for the records of a run and what is written beside them
REMEDIES = {
    errno.ENOSPC: "make room there, or name a folder on another disk",
    errno.EDQUOT: "make room there, or name a folder on another disk",
    errno.EROFS: "the file system can only be read; name a folder elsewhere",
    errno.EACCES: "name a folder that you may write to, or change its permissions",
    errno.EPERM: "name a folder that you may write to, or change its permissions",
    errno.EEXIST: "there is a file of that name; name another folder, or move the file",
    errno.ENOTDIR: "a part of the path is a file; name another folder",
}


class RunsFolder(os.PathLike[str]):
    """Where results go that nobody has named a folder for: `runs` in the current folder, or for work in copies of the
    notebooks, whose kernels start beside them, the `runs` of the copies. It is looked up whenever it is used.
    """

    def __fspath__(self) -> str:
        here = Path.cwd()
        copies = next((folder for folder in (here, *here.parents) if (folder / COPIES).is_file()), None)
        return "runs" if copies is None else str(runs_of(copies))

    def __str__(self) -> str:
        return "runs"

    __repr__ = __str__


RUNS = RunsFolder()


def runs_of(copies: Path) -> Path:
    """The folder for the results of a folder of copies: the `runs` that it lies in, else one in it."""
    return copies.parent if copies.parent.name == str(RUNS) else copies / str(RUNS)


def check_output_folder(
    folder: str | os.PathLike[str], *, room_bytes: int = ROOM_BYTES, what: str = "results", option: str = ""
) -> Path:
    """The folder, which exists from now on, can be written to, and has room for `what`. option: what named it, by
    default the parameter output.

    UserError names what is in the way.
    """
    path, option = Path(folder), option or setting("output")
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
    """What the system says, and what to do about it where that is known."""
    said = os.strerror(error.errno) if error.errno else str(error)
    remedy = REMEDIES.get(error.errno or 0)
    return f"{said}; {remedy}" if remedy else said
