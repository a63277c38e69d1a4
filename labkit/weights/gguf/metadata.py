"""The metadata of a GGUF file by key, with checks of each value's type."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from labkit.system.errors import UserError
from labkit.system.shown import shown_value
from labkit.weights.gguf.header import StringList, Value

TOKENIZER = "tokenizer.ggml"


class Metadata:
    """The values of one file. Each method returns None for a key that the file lacks, and raises UserError for a value
    of another type.
    """

    def __init__(self, path: Path, values: Mapping[str, Value]) -> None:
        self.path = path
        self._values = values

    def names(self) -> set[str]:
        return set(self._values)

    def size(self, key: str) -> int | None:
        """A whole number of at least 0."""
        value = self._values.get(key)
        if value is None or (type(value) is int and value >= 0):
            return value
        raise self._other(key, "a whole number that is not negative")

    def needed_size(self, key: str) -> int:
        """As `size`, for a key that the file must have."""
        value = self.size(key)
        if value is None:
            raise UserError(f"{self.path} has no {key}; convert it again")
        return value

    def number(self, key: str) -> float | None:
        value = self._values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._other(key, "a finite number")
        return float(value)

    def flag(self, key: str) -> bool | None:
        value = self._values.get(key)
        if value is None or isinstance(value, bool):
            return value
        raise self._other(key, "true or false")

    def text(self, key: str) -> str | None:
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, bytes):
            raise self._other(key, "a string")
        return self._decoded(key, value)

    def texts(self, key: str) -> list[str] | None:
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, StringList):
            raise self._other(key, "a list of strings")
        return [self._decoded(key, text) for text in value]

    def numbers(self, key: str) -> list[float] | None:
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "iuf":
            raise self._other(key, "a list of numbers")
        numbers: list[float] = value.tolist()
        return numbers

    def count(self, key: str) -> int | None:
        """How many items a list has."""
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, StringList | np.ndarray):
            raise self._other(key, "a list")
        return len(value)

    def _decoded(self, key: str, text: bytes) -> str:
        try:
            return text.decode()
        except UnicodeDecodeError:
            raise self._other(key, "text in UTF-8", text) from None

    def _other(self, key: str, expected: str, value: object = None) -> UserError:
        value = self._values[key] if value is None else value
        got = f"a list of {len(value)}" if isinstance(value, StringList | np.ndarray) else shown_value(value)
        return UserError(f"{self.path}: {key} is {got}, expected {expected}; convert the file again")
