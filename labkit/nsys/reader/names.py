"""Texts as the categories of a column: each text is kept once, and the rows hold its number."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd
from numpy.typing import NDArray


class Names:
    """Numbers for texts, in the order in which the texts come."""

    def __init__(self) -> None:
        self._codes: dict[str, int] = {}

    def code(self, text: str) -> int:
        return self._codes.setdefault(text, len(self._codes))

    def codes(self, texts: Iterable[str]) -> NDArray[np.int32]:
        return np.fromiter(map(self.code, texts), np.int32)

    def categorical(self, codes: NDArray[np.integer]) -> pd.Categorical:
        """The column whose rows have these numbers."""
        return pd.Categorical.from_codes(codes, pd.Index(list(self._codes), dtype="str"))  # type: ignore[arg-type]
