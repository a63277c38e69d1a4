"""Files that a user names or that lie in a stranger's folder. Opening one never waits: a pipe has no end until someone
writes to it.
"""

from __future__ import annotations

import os
import select
import stat
import time
from io import BufferedReader
from pathlib import Path

from labkit.system.errors import UserError
from labkit.system.home import expanded

WRITER_S = 5.0  # for the writer of a pipe to open it
POLL_MS = 50
CHUNK = 1 << 16


def open_file(path: Path, expected: str) -> BufferedReader:
    """Opens a file or a device for reading bytes. `expected`: what the file should be, for the error message.

    UserError: it is a pipe. OSError, which names the path: it cannot be opened.
    """

    path = expanded(path)

    def opener(name: str, flags: int) -> int:
        descriptor = _opened(name, flags)
        if _is_pipe(descriptor):
            os.close(descriptor)
            raise UserError(f"got {path}, which is a pipe; expected {expected}: write its content to a file first")
        os.set_blocking(descriptor, True)
        return descriptor

    return open(path, "rb", opener=opener)


def read_file(path: Path, expected: str) -> bytes:
    """The content of a file. Errors: as `open_file`, and UserError for a device, which may have no end."""
    with open_file(path, expected) as file:
        if not _is_regular(file.fileno()):
            raise UserError(f"got {path}, which is a device; expected {expected}: name a file")
        return file.read()


def decoded(content: bytes, path: Path, expected: str) -> str:
    """The text of a file's content. UserError: it is not UTF-8."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start}); expected {expected}") from None


def read_stream(path: Path, most: int) -> bytes:
    """The content of a file, or at most the first `most` bytes of a pipe or a device.

    UserError: nobody has opened the pipe to write to it within WRITER_S seconds. OSError, which names the path: it
    cannot be opened.
    """
    path = expanded(path)
    with open(path, "rb", buffering=0, opener=_opened) as file:
        descriptor = file.fileno()
        first = _wait_for_content(descriptor, path) if _is_pipe(descriptor) else b""
        os.set_blocking(descriptor, True)
        limit = None if _is_regular(descriptor) else most
        content = bytearray(first)
        while (limit is None or len(content) < limit) and (part := file.read(CHUNK)):
            content += part
    return bytes(content if limit is None else content[:limit])


def _wait_for_content(descriptor: int, path: Path) -> bytes:
    """Waits until a pipe has content, or until its writer has closed it. A writer may take its time.

    Returns the bytes that the wait itself has read. Usually it has read none, and all content is still in the pipe.
    UserError: nobody opens the pipe to write to it within WRITER_S seconds.
    """
    events = select.poll()
    events.register(descriptor, select.POLLIN)
    limit = time.monotonic() + WRITER_S
    while not events.poll(POLL_MS):
        try:
            if first := os.read(descriptor, CHUNK):
                return first
        except BlockingIOError:  # there is a writer, who has not written yet
            events.poll()
            return b""
        if time.monotonic() > limit:
            raise UserError(
                f"got {path}, a pipe that nobody writes to; write to it within {WRITER_S:g} s, or name a file"
            )
    return b""


def _opened(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY)


def _is_pipe(descriptor: int) -> bool:
    return stat.S_ISFIFO(os.fstat(descriptor).st_mode)


def _is_regular(descriptor: int) -> bool:
    return stat.S_ISREG(os.fstat(descriptor).st_mode)
