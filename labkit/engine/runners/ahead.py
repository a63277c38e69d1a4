"""Several steps in one call: between two steps in Python the processor's caches are cold, and threads fall asleep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from labkit.kernels.decode_step import TextRules

GOES_ON, ENDS, STOPS = 0, 1, 2  # marks of tokens


@dataclass(frozen=True)
class Ahead:
    """Further steps that a runner may run in the call of a step, each with the tokens that the one before chose.

    most: steps in all, at least 1.
    marks: returns uint8 [V], the mark of every token of a vocabulary: ENDS ends a text; after STOPS the caller has to
    look at the texts, and no further step runs.
    ended: rows that have ended. Once all have, no further step runs.
    pad: token of rows that have ended; None: they go on.
    choice: how tokens are chosen; None: the argmax.
    """

    most: int
    marks: Callable[[int], Tensor]
    ended: frozenset[int]
    pad: int | None
    choice: TextRules | None = None

    def add(self, tokens: Tensor) -> None:
        """Adds tokens int64 [B], on the device of `choice`, to its texts; padding to texts that have ended."""
        assert self.choice is not None
        for row in self.ended if self.pad is not None else ():
            tokens[row] = self.pad
        self.choice.tokens[:, self.choice.length] = tokens
