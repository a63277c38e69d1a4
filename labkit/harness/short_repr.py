"""The `repr` of records, which may hold thousands of samples: all fields, long ones cut short."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from labkit.system.validation import Listed

MOST_SHOWN = 80  # characters of a field


class _Cut:
    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text if len(self._text) <= MOST_SHOWN else f"{self._text[:MOST_SHOWN]}…"


class ShortRepr(Listed):
    """A pydantic model whose `repr` cuts long fields short."""

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, _Cut(repr(value))
