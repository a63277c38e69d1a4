"""The metadata of a GGUF file by key, with checks of each value's type."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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
        size: int | None = self._value(
            key, "a whole number that is not negative", lambda value: type(value) is int and value >= 0
        )
        return size

    def needed_size(self, key: str) -> int:
        """As `size`, for a key that the file must have."""
        value = self.size(key)
        if value is None:
            raise UserError(f"{self.path} has no {key}; convert it again")
        return value

    def number(self, key: str) -> float | None:
        value = self._value(key, "a finite number", _is_finite)
        return None if value is None else float(value)

    def flag(self, key: str) -> bool | None:
        flag: bool | None = self._value(key, "true or false", lambda value: isinstance(value, bool))
        return flag

    def text(self, key: str) -> str | None:
        value = self._value(key, "a string", lambda value: isinstance(value, bytes))
        return None if value is None else self._decoded(key, value)

    def texts(self, key: str) -> list[str] | None:
        value = self._value(key, "a list of strings", lambda value: isinstance(value, StringList))
        return None if value is None else [self._decoded(key, text) for text in value]

    def numbers(self, key: str) -> list[float] | None:
        value = self._value(
            key, "a list of numbers", lambda value: isinstance(value, np.ndarray) and value.dtype.kind in "iuf"
        )
        return None if value is None else list(value.tolist())

    def flags(self, key: str) -> list[bool] | None:
        value = self._value(
            key, "a list of true and false", lambda value: isinstance(value, np.ndarray) and value.dtype.kind == "b"
        )
        return None if value is None else list(value.tolist())

    def count(self, key: str) -> int | None:
        """How many items a list has."""
        value = self._value(key, "a list", lambda value: isinstance(value, StringList | np.ndarray))
        return None if value is None else len(value)

    def _value(self, key: str, expected: str, is_right: Callable[[Any], bool]) -> Any:
        value = self._values.get(key)
        if value is None or is_right(value):
            return value
        raise self._other(key, expected, value)

    def _decoded(self, key: str, text: bytes) -> str:
        try:
            return text.decode()
        except UnicodeDecodeError:
            raise self._other(key, "text in UTF-8", text) from None

    def _other(self, key: str, expected: str, value: object) -> UserError:
        got = f"a list of {len(value)}" if isinstance(value, StringList | np.ndarray) else shown_value(value)
        return UserError(f"{self.path}: {key} is {got}, expected {expected}; convert the file again")


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
