"""Bases of records: immutable, with a `repr` that stays short although records may hold thousands of samples."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import ConfigDict, Field

from labkit.system.validation import Listed

SCHEMA_VERSION: Literal[1] = 1
MOST_SHOWN = 80  # characters of a field in the `repr`


class _Cut:
    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text if len(self._text) <= MOST_SHOWN else f"{self._text[:MOST_SHOWN]}…"


class FrozenRecord(Listed):
    """An immutable record. It refuses unknown fields when it is read back, and its `repr` cuts long fields short."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, _Cut(repr(value))


class ResultRecord(FrozenRecord):
    """A record that is a line of a file of results, or the whole file. Each subclass has its own `kind`."""

    kind: str
    schema_version: Literal[1] = SCHEMA_VERSION
    created: datetime = Field(default_factory=lambda: datetime.now(UTC))
