"""Choice between several micro-batches and one, by measured times of tokens.

Several micro-batches keep all stages at work, but read the weights once for each. So one micro-batch may be faster for
few rows if the stages share a memory, and several are faster for more rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor

PAIRS = 3  # most pairs of laps
CLEARLY = 0.95  # one micro-batch has to take less than this share of the time of several, in most pairs
HOPELESS = 1.1  # the trial ends if one micro-batch takes more than this share of the time of several, in any pair


@dataclass(frozen=True)
class Compared:
    """Times of a token of all `rows` in several micro-batches and in one, in pairs of laps next to each other."""

    rows: int
    prompt: int  # tokens of each row before the laps
    several: int  # number of micro-batches
    several_ms: tuple[float, ...] = ()  # in each pair
    one_ms: tuple[float, ...] = ()  # in each pair

    @property
    def chosen(self) -> int | None:
        """1 if one micro-batch was clearly faster in most pairs, else `several`; None: more pairs are needed."""
        ratios = [one / several for several, one in zip(self.several_ms, self.one_ms, strict=True)]
        clear = sum(ratio < CLEARLY for ratio in ratios)
        if 2 * clear > PAIRS:
            return 1
        several_win = 2 * (len(ratios) - clear) > PAIRS or any(ratio > HOPELESS for ratio in ratios)
        return self.several if several_win else None

    def with_pair(self, several_ms: float, one_ms: float) -> Compared:
        """Returns the comparison with one more pair."""
        return replace(self, several_ms=(*self.several_ms, several_ms), one_ms=(*self.one_ms, one_ms))

    @property
    def payload(self) -> Tensor:
        """The comparison as payload of a message, float32 [1, N]."""
        pairs = zip(self.several_ms, self.one_ms, strict=True)
        numbers = [self.rows, self.prompt, self.several, *(ms for pair in pairs for ms in pair)]
        return torch.tensor([numbers], dtype=torch.float32)

    @classmethod
    def from_payload(cls, payload: Tensor) -> Compared:
        """Returns the comparison in `payload`."""
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
    """Measurements so far, separate for prompts of different lengths: keys and values are read once with any number of
    micro-batches, but weights once for each micro-batch.
    """

    def __init__(self) -> None:
        self._by_size: dict[tuple[int, int], Compared] = {}

    @property
    def compared(self) -> tuple[Compared, ...]:
        """Decided comparisons."""
        return tuple(self._decided())

    def chosen(self, rows: int, prompt: int) -> int | None:
        """Returns the best number of micro-batches for `rows` rows with such prompts; None: unknown. Uses comparisons
        for other numbers of rows, too: if one micro-batch is faster, it is also faster for fewer rows, and if several
        are faster, they are also faster for more rows.
        """
        for comparison in self._decided():
            if _length_class(comparison.prompt) == _length_class(prompt):
                if comparison.chosen == 1 and rows <= comparison.rows:
                    return 1
                if comparison.chosen != 1 and rows >= comparison.rows:
                    return comparison.chosen
        return None

    def trial(self, rows: int, prompt: int, several: int) -> Compared:
        """Returns the comparison for `rows` rows so far, which may be empty."""
        return self._by_size.get((rows, _length_class(prompt)), Compared(rows, prompt, several))

    def note(self, trial: Compared) -> None:
        self._by_size[trial.rows, _length_class(trial.prompt)] = trial

    def _decided(self) -> Iterator[Compared]:
        return (trial for trial in self._by_size.values() if trial.chosen is not None)


def _length_class(tokens: int) -> int:
    """Returns the same number for all lengths between two powers of two."""
    return tokens.bit_length()
