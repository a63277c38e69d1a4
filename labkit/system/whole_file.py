"""Files that are written whole or not at all."""

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
from labkit.system.home import expanded

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """A temporary path to write to. It becomes `target` at the end, and is removed after an error.

    A symbolic link stays, and the file that it leads to is replaced. A replaced file keeps its mode; a new file has the
    mode that the umask leaves. A device, a pipe and a descriptor of this process, such as /dev/stdout, get the content
    at the end.

    A killed process leaves the unfinished file next to `target`. The file is locked while it is written, so that
    `remove_unfinished` can recognise it.

    UserError: the target is a folder. OSError, which names the target: it cannot be written.
    """
    target = expanded(target)
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
    """Writes `text` to `target`, whole or not at all."""
    with whole_file(target) as path:
        path.write_text(text, encoding="utf-8")


def check_output_file(target: Path) -> None:
    """Checks that `target` can be written, and makes nothing. For commands that compute for long before they write.

    The folder of an existing file is checked, too, because `whole_file` makes a temporary file in it. Next to a stream,
    such as /dev/stdout, it makes none.

    UserError: the target is a folder. OSError, which names the target: it is not writable, or its folder is not.
    """
    target = expanded(target)
    if _is_stream(target, _present(target)):
        return
    nearest = next(folder for folder in Path(os.path.realpath(target)).parents if folder.exists())
    if not nearest.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(target))
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(target))


def check_no_input(output: Path, inputs: Iterable[Path], option: str = "--output", kind: str = "the input") -> None:
    """Raises UserError if the output is one of the inputs, by any name or link: the input would be replaced."""
    output = expanded(output)
    for path in map(expanded, inputs):
        with suppress(OSError):  # one of the files does not exist
            if output.samefile(path) and not _is_stream(output, output.stat()):
                raise UserError(f"got {option} {output}, which is {kind} {path}; name another file")


def check_two_outputs(**outputs: Path | None) -> None:
    """Raises UserError if two outputs of a command are one file: the second would replace the first. The keywords are
    the options' names; None: the option was not used.
    """
    seen: dict[str, str] = {}
    for name, path in outputs.items():
        if path is None:
            continue
        output = expanded(path)
        if output.exists() and _is_stream(output, output.stat()):
            continue
        if (first := seen.setdefault(os.path.realpath(output), name)) != name:
            raise UserError(f"got {output} as --{first} and as --{name}; name two files")


def remove_unfinished(folder: Path, suffix: str) -> None:
    """Removes the unfinished files with this suffix that killed processes have left in a folder.

    A file that a living process writes is locked, and stays. On a file system without locks every file stays.
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
    """The status of the present file, after all links; None if it does not exist. UserError: it is a folder. OSError:
    it is not writable.
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
    """The number of this process's descriptor if the path, or a link on its way, is one (/proc/PID/fd/N); else None."""
    while True:
        folder = os.path.realpath(target.parent)
        if folder == f"/proc/{os.getpid()}/fd" and target.name.isdecimal():
            return int(target.name)
        if not target.is_symlink():
            return None
        target = Path(folder, os.readlink(target))


@contextmanager
def _content_for(target: Path) -> Iterator[Path]:
    """A temporary file that is copied to the stream `target` once it is complete."""
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
    for stream in (sys.stdout, sys.stderr):  # earlier output has to come first
        stream.flush()
    return os.fdopen(os.dup(number), "wb")


def _locked_file(target: Path, present: os.stat_result | None) -> tuple[Path, int]:
    """An empty file next to `target`, with the mode and owner of the present file, and the descriptor of its lock."""
    mode = 0o666 if present is None else stat.S_IMODE(present.st_mode)
    while True:
        path = target.with_name(f".{token_hex(4)}.tmp{target.suffix}")
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode & 0o777)
        except FileExistsError:
            continue
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(target)) from None
        with suppress(OSError):  # without locks no file is ever removed as unfinished
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink:  # else another process removed it before it was locked
            break
        os.close(descriptor)
    if present is not None:
        with suppress(OSError):  # only root may change the owner
            os.fchown(descriptor, present.st_uid, present.st_gid)
        with suppress(OSError):  # the file system has no modes
            os.fchmod(descriptor, mode)
    return path, descriptor
