"""Strangers' text and values, made safe for a terminal."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from reprlib import Repr
from typing import Any

# C0 and DEL, C1, the marks and overrides of text direction, and the two separators that some terminals take for line
# ends. Lone surrogates, which cannot be encoded, stand for bytes of a file name that are not UTF-8.
CONTROLS = "\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
CONTROL = re.compile(f"[{CONTROLS}]")
CONTROL_OF_LINES = re.compile(f"(?![\n\t])[{CONTROLS}]")
MOST_SHOWN = 40  # characters of a text, and bytes


def shown(text: str) -> str:
    r"""`text` in one line, with control characters escaped as Python writes them, such as `\x1b[2J` and `\n`.

    For names of files, tensors, kernels, ranges and metadata: a terminal then prints a control sequence instead of
    obeying it.
    """
    return CONTROL.sub(_escape, text)


def shown_lines(text: str) -> str:
    """Like `shown`, but line feeds and tabs stay: for text of several lines, such as messages and answers."""
    return CONTROL_OF_LINES.sub(_escape, text)


def shown_value(value: object) -> str:
    r"""A value of a stranger's file, in one short line, as JSON writes it: "text", null, true, [1, 2], {"key": 1}.

    Bytes are shown as text; bytes that are not UTF-8 are shown as `\xff`. Long texts, lists and objects are cut.
    """
    return _VALUES.repr(value)


class _Values(Repr):
    def repr_str(self, text: str, level: int) -> str:
        cut = text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"
        return f'"{shown(cut)}"'

    def repr_bytes(self, data: bytes, level: int) -> str:
        return self.repr_str(data[: 4 * MOST_SHOWN].decode(errors="backslashreplace"), level)

    def repr_bool(self, value: bool, level: int) -> str:
        return str(value).lower()

    def repr_NoneType(self, value: None, level: int) -> str:
        return "null"

    def repr_tuple(self, items: tuple[object, ...], level: int) -> str:
        return self.repr_list(list(items), level)


_VALUES = _Values()


@contextmanager
def shown_logs() -> Iterator[None]:
    """Inside this context the messages of all loggers and the warnings of Python are escaped as by `shown_lines`."""
    factory, formatted = logging.getLogRecordFactory(), warnings.formatwarning

    def formatted_and_shown(*facts: Any, **more: Any) -> str:
        return shown_lines(formatted(*facts, **more))

    logging.setLogRecordFactory(_ShownRecord)
    warnings.formatwarning = formatted_and_shown
    try:
        yield
    finally:
        logging.setLogRecordFactory(factory)
        warnings.formatwarning = formatted


class _ShownRecord(logging.LogRecord):
    def getMessage(self) -> str:
        return shown_lines(super().getMessage())


def _escape(control: re.Match[str]) -> str:
    return control[0].encode("unicode_escape").decode("ascii")
