"""The lines of a file that another process appends to."""

from __future__ import annotations

import codecs
import ctypes
import io
import os
import sys
from collections.abc import Callable

CHUNK = 1 << 20  # bytes
LONGEST = 1 << 16  # characters: a longer line comes in pieces
FREED = 16 << 20  # bytes that are read before their disk space is freed
KEEP_SIZE, PUNCH_HOLE = 1, 2  # of fallocate


class AppendedLines:
    """Follows a file and calls `hear` with each line, without its line end. Nothing that was read is kept: on Linux
    its disk space is freed, too.
    """

    def __init__(self, descriptor: int, hear: Callable[[str], None]) -> None:
        self._descriptor, self._hear = descriptor, hear
        self._at, self._freed, self._rest = 0, 0, ""
        self._decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")("replace"), translate=True)

    def read(self, *, last: bool = False) -> None:
        """Reads what was appended so far. A line without its end is held back until the `last` call."""
        until = os.fstat(self._descriptor).st_size
        while self._at < until and (data := os.pread(self._descriptor, min(CHUNK, until - self._at), self._at)):
            self._at += len(data)
            self._take(self._decoder.decode(data))
            self._free()
        if last:
            self._take(self._decoder.decode(b"", final=True))
            if self._rest:
                self._take("\n")

    def _take(self, text: str) -> None:
        *lines, rest = (self._rest + text).split("\n")
        for line in lines:
            for at in range(0, max(len(line), 1), LONGEST):
                self._hear(line[at : at + LONGEST])
        while len(rest) > LONGEST:
            self._hear(rest[:LONGEST])
            rest = rest[LONGEST:]
        self._rest = rest

    def _free(self) -> None:
        if sys.platform == "linux" and self._at - self._freed >= FREED:
            begin, length = ctypes.c_long(self._freed), ctypes.c_long(self._at - self._freed)
            ctypes.CDLL(None).fallocate(self._descriptor, KEEP_SIZE | PUNCH_HOLE, begin, length)
            self._freed = self._at
