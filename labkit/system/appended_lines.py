"""The lines of a file that another process appends to."""

from __future__ import annotations

import codecs
import io
import os
from collections.abc import Callable


class AppendedLines:
    """Follows a file: `lines` collects its lines without their ends, and `echo` is called with each."""

    def __init__(self, descriptor: int, echo: Callable[[str], None] | None = None) -> None:
        self.lines: list[str] = []
        self._descriptor, self._echo = descriptor, echo
        self._at, self._rest = 0, ""
        self._decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")("replace"), translate=True)

    def read(self, *, last: bool = False) -> None:
        """Take in what has come since; a line without an end waits for it until the `last` time."""
        while data := os.pread(self._descriptor, 1 << 20, self._at):
            self._at += len(data)
            self._rest += self._decoder.decode(data)
        if last:
            self._rest += self._decoder.decode(b"", final=True)
        *lines, self._rest = self._rest.split("\n")
        if last and self._rest:
            lines.append(self._rest)
            self._rest = ""
        for line in lines:
            self.lines.append(line)
            if self._echo:
                self._echo(line)
