"""Whether the rows of a batch are faster in several micro-batches or in one, by measured times of their tokens.

Several keep all stages at work, and read the weights for each of them. So with few rows one micro-batch may be faster,
where the stages share a memory, and with more rows several are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor

PAIRS = 3  # of laps, at most
CLEARLY = 0.95  # of the time in several: one micro-batch has to fall below it in most pairs
HOPELESS = 1.1  # of the time in several: a single pair in which one micro-batch takes longer ends the trial


@dataclass(frozen=True)
class Compared:
    """Milliseconds of a token of all `rows`, in `several` micro-batches and in one, in pairs of laps that followed each
    other. prompt: the tokens of each row that they came behind.
    """

    rows: int
    prompt: int
    several: int
    several_ms: tuple[float, ...] = ()
    one_ms: tuple[float, ...] = ()

    @property
    def chosen(self) -> int | None:
        """One micro-batch where it was clearly faster in most pairs, else several; None: more pairs are wanted."""
        ratios = [one / several for several, one in zip(self.several_ms, self.one_ms, strict=True)]
        clear = sum(ratio < CLEARLY for ratio in ratios)
        if 2 * clear > PAIRS:
            return 1
        settled = 2 * (len(ratios) - clear) > PAIRS or any(ratio > HOPELESS for ratio in ratios)
        return self.several if settled else None

    def followed_by(self, several_ms: float, one_ms: float) -> Compared:
        """With one more pair."""
        return replace(self, several_ms=(*self.several_ms, several_ms), one_ms=(*self.one_ms, one_ms))

    @property
    def payload(self) -> Tensor:
        """All of it in a message, float32 [1, N]."""
        pairs = zip(self.several_ms, self.one_ms, strict=True)
        numbers = [self.rows, self.prompt, self.several, *(ms for pair in pairs for ms in pair)]
        return torch.tensor([numbers], dtype=torch.float32)

    @classmethod
    def said_in(cls, payload: Tensor) -> Compared:
        """What `payload` was made of."""
        rows, prompt, several, *ms = payload[0].tolist()
        return cls(int(rows), int(prompt), int(several), tuple(ms[::2]), tuple(ms[1::2]))

    def __str__(self) -> str:
        several, one = median(self.several_ms), median(self.one_ms)
        chosen = "one" if self.chosen == 1 else f"{self.several} micro-batches"
        return (
            f"a token of {self.rows} rows takes {several:.1f} ms in {self.several} micro-batches and {one:.1f} ms in "
            f"one; such batches are generated in {chosen} from here on"
        )


class MicroBatchCounts:
    """What was measured so far, apart for prompts of other lengths, since keys and values are read once whatever the
    number of micro-batches, and weights once for each.
    """

    def __init__(self) -> None:
        self._by_size: dict[tuple[int, int], Compared] = {}

    @property
    def compared(self) -> tuple[Compared, ...]:
        """What has been decided."""
        return tuple(self._decided())

    def chosen(self, rows: int, prompt: int) -> int | None:
        """How many micro-batches `rows` with such prompts are to have; None: unknown. What is known of other numbers of
        rows is used: where one micro-batch is faster it is so for fewer rows, and several are for more.
        """
        for found in self._decided():
            if _about(found.prompt) == _about(prompt):
                if found.chosen == 1 and rows <= found.rows:
                    return 1
                if found.chosen != 1 and rows >= found.rows:
                    return found.chosen
        return None

    def trial(self, rows: int, prompt: int, several: int) -> Compared:
        """What has been measured so far of so many rows, which may be nothing."""
        return self._by_size.get((rows, _about(prompt)), Compared(rows, prompt, several))

    def note(self, found: Compared) -> None:
        self._by_size[found.rows, _about(found.prompt)] = found

    def _decided(self) -> Iterator[Compared]:
        return (found for found in self._by_size.values() if found.chosen is not None)


def _about(tokens: int) -> int:
    """The same for numbers between two powers of two."""
    return tokens.bit_length()
