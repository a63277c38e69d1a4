"""Files that are there whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO

from labkit.system.errors import UserError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """A path to write to: its content becomes `target` at the end, and is removed where anything goes wrong.

    A link stays, and the file that it leads to is replaced. A replaced file keeps its mode, a new one has what the
    umask leaves. A device, a pipe and a descriptor of this process, such as /dev/stdout, get the content at the end.

    A process that is killed leaves the unfinished file behind, beside `target`. The file is locked while it is written,
    so that `remove_unfinished` can tell.

    UserError: a folder. OSError, naming the target: it cannot be written.
    """
    present = _present(target)
    if _is_stream(target, present):
        with _content_for(target) as path:
            yield path
        return
    target = Path(os.path.realpath(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    path, lock = _locked_file(target, present)
    try:
        yield path
        path.replace(target)
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None and error.errno in NO_ROOM:
            raise OSError(error.errno, error.strerror, str(target)) from None
        raise
    finally:
        os.close(lock)


def write_whole(target: Path, text: str) -> None:
    """Write `text` to `target`: nobody ever sees half of it."""
    with whole_file(target) as path:
        path.write_text(text, encoding="utf-8")


def check_no_input(output: Path, inputs: Iterable[Path], option: str = "--output") -> None:
    """UserError for an output that is one of the inputs, by whatever name or link: it would be replaced."""
    for path in inputs:
        with suppress(OSError):  # one that is not there
            if output.samefile(path) and not _is_stream(output, output.stat()):
                raise UserError(f"got {option} {output}, which is the input {path}; name another file")


def check_two_outputs(**outputs: Path | None) -> None:
    """UserError where two outputs of a command, by the names of their options, are one file: the second would replace
    the first. None: not asked for.
    """
    seen: dict[str, str] = {}
    for name, output in outputs.items():
        if output is None or (output.exists() and _is_stream(output, output.stat())):
            continue
        if (other := seen.setdefault(os.path.realpath(output), name)) != name:
            raise UserError(f"got {output} as --{other} and as --{name}; name two files")


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


def _present(target: Path) -> os.stat_result | None:
    """What is there under the name, at the end of all links. UserError: a folder; OSError: nothing that may be written
    to.
    """
    try:
        present = target.stat()
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(present.st_mode):
        raise UserError(f"got {target} to write to, which is a folder; name a file in it")
    if not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(target))
    return present


def _is_stream(target: Path, present: os.stat_result | None) -> bool:
    if present is None:
        return False
    return not stat.S_ISREG(present.st_mode) or _own_descriptor(target) is not None


def _own_descriptor(target: Path) -> int | None:
    """The number of the descriptor of this process that the path or a link on its way stands for."""
    while True:
        folder = os.path.realpath(target.parent)
        if folder == f"/proc/{os.getpid()}/fd" and target.name.isdecimal():
            return int(target.name)
        if not target.is_symlink():
            return None
        target = Path(folder, os.readlink(target))


@contextmanager
def _content_for(target: Path) -> Iterator[Path]:
    """A file in the folder for temporary files that is copied to the stream `target` once it is complete."""
    with tempfile.TemporaryDirectory(prefix="labkit-") as folder:
        path = Path(folder, f"content{target.suffix}")
        yield path
        try:
            with path.open("rb") as content, _opened(target) as stream:
                shutil.copyfileobj(content, stream)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(target)) from None


def _opened(target: Path) -> BinaryIO:
    number = _own_descriptor(target)
    if number is None:
        return target.open("wb")
    for stream in (sys.stdout, sys.stderr):  # what was printed before comes before
        stream.flush()
    return os.fdopen(os.dup(number), "wb")


def _locked_file(target: Path, present: os.stat_result | None) -> tuple[Path, int]:
    """An empty file beside `target` with the mode and the owner of the present file, and the descriptor of its lock."""
    mode = 0o666 if present is None else stat.S_IMODE(present.st_mode)
    while True:
        path = target.with_name(f".{token_hex(4)}.tmp{target.suffix}")
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode & 0o777)
        except FileExistsError:
            continue
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(target)) from None
        with suppress(OSError):  # without locks nothing is ever removed as unfinished
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink:  # else it was taken for a dead one before it was locked
            break
        os.close(descriptor)
    if present is not None:
        with suppress(OSError):  # only root gives files away
            os.fchown(descriptor, present.st_uid, present.st_gid)
        with suppress(OSError):  # a file system without modes
            os.fchmod(descriptor, mode)
    return path, descriptor
