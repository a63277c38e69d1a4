"""Checks the text of a JSON file before the parser gets it, because the parser breaks on some texts.

yajl ends the process on whole numbers of thousands of digits, and takes hours for texts nested a million deep. For a
string with escapes its time grows with the square of the length. A list of events may lack its closing bracket: the
Chrome format allows this, so that a recorder does not have to write an end.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from typing import Any

ENDS_BYTES = 1 << 16  # of each end of the text; these ends hold everything besides the events
MOST_DIGITS, MOST_OPEN = 1000, 10_000
MOST_IN_ONE = 1 << 26  # bytes of one event
MOST_ESCAPED = 1 << 20  # bytes of one text with escapes
QUOTE = re.compile(rb'(?<!\\)"')  # at an end of a string, never within one
DIGITS = bytes(ord("0") if chr(byte).isdigit() and byte < 128 else ord(" ") for byte in range(256))
LONG_NUMBER = b"0" * MOST_DIGITS
BOM = codecs.BOM_UTF8


class DeepOrLong(Exception):
    """The text has content that the parser does not survive."""


class JsonText:
    """A file that is read once, from start to end. It keeps both ends of the text.

    count: returns the number of events so far. repair: replace bytes that are not UTF-8. The attribute `unclosed` says
    whether the list of events had no end, and got one. Raises DeepOrLong for content that the parser does not survive.
    """

    def __init__(self, file: Any, count: Callable[[], int], *, repair: bool = False) -> None:
        self._file, self._count = file, count
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace") if repair else None
        self._seen = self._open = self._bytes = self._escaped = 0
        self._last = b""
        self.unclosed = self._ended = False
        self._head = self._next = self._checked(file.read(ENDS_BYTES).removeprefix(BOM))
        self._tail = b""

    @property
    def is_list(self) -> bool:
        return self._head.lstrip().startswith(b"[")

    @property
    def ends(self) -> bytes:
        return self._head + self._tail

    def read(self, size: int) -> bytes:
        if size == 0:  # ijson asks whether it gets bytes
            return b""
        chunk, self._next = self._next, b""
        if not chunk and not self._ended:
            chunk = self._checked(self._file.read(size))
            self._tail = (self._tail + chunk)[-ENDS_BYTES:]
            if not chunk:
                self._ended = True
                chunk = self._closing()
        return chunk

    def _closing(self) -> bytes:
        """The missing end of a list of events; empty if the list is complete, or ends within an event."""
        last = self.ends.rstrip()[-1:]
        if not self.is_list or last not in (b"}", b",") or not self._count():
            return b""
        self.unclosed = True
        return b"]" if last == b"}" else b"{}]"

    def _checked(self, chunk: bytes) -> bytes:
        if self._decoder is not None:
            chunk = self._decoder.decode(chunk, final=not chunk).encode()
        if LONG_NUMBER in (self._last[-MOST_DIGITS:] + chunk).translate(DIGITS):
            raise DeepOrLong(f"it has a number of more than {MOST_DIGITS} digits")
        in_one_text = b"\\" in chunk and not QUOTE.search(self._last[-1:] + chunk, 1)
        self._last = chunk
        self._escaped = self._escaped + len(chunk) if in_one_text else 0
        if self._escaped > MOST_ESCAPED:
            raise DeepOrLong("it has a text of megabytes with escapes")
        if self._count() != self._seen:
            self._seen, self._open, self._bytes = self._count(), 0, 0
        self._open += sum(map(chunk.count, (b"[", b"{"))) - sum(map(chunk.count, (b"]", b"}")))
        self._bytes += len(chunk)
        if self._open > MOST_OPEN or (self._seen and self._bytes > MOST_IN_ONE):
            raise DeepOrLong("it is nested thousands deep, or has an event of many megabytes")
        return chunk
