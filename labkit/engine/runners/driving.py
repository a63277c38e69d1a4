"""Loops that ask for steps until a text is done, and what runs one or several of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from torch import Tensor

from labkit.engine.memory.kv_cache import KVCache
from labkit.engine.runners.step import Pending, StepInput, StepOutput
from labkit.stages import StepRanges

if TYPE_CHECKING:
    from transformers.generation import GenerateDecoderOnlyOutput

Found: TypeAlias = "Tensor | GenerateDecoderOnlyOutput"
Loop: TypeAlias = Generator[StepInput, StepOutput, Found]


class TextBatch(Protocol):
    """TextBatch to be continued: the rows of one call of `generate`.

    rows: how many. pad: the token behind a text that has ended. cache: empty, or with what the rows begin with.
    wants_tokens_alone: nobody asks for scores, logits or the cache, or for tokens before all are there.
    together: why the rows can't be divided; None: each can be continued without the others.
    asked: all else that is asked for, as ranks compare it.
    ends: the tokens that a row ends with, where one that has ended can be left out; None: rows stay to the end.
    draws: tokens are drawn at random, one row after the other.
    longest: how many tokens a text can have, the prompt's with them; None: unknown.
    """

    @property
    def cache(self) -> KVCache: ...

    @property
    def rows(self) -> int: ...

    @property
    def pad(self) -> int: ...

    @property
    def wants_tokens_alone(self) -> bool: ...

    @property
    def together(self) -> str | None: ...

    @property
    def asked(self) -> str: ...

    @property
    def ends(self) -> frozenset[int] | None: ...

    @property
    def draws(self) -> bool: ...

    @property
    def longest(self) -> int | None: ...

    @property
    def tokens(self) -> Tensor:
        """int64 [rows, T]: what the texts begin with."""

    def part(self, rows: range, cache: KVCache) -> TextBatch:
        """Some of the rows, with a cache of their own."""

    def continued(self, tokens: Tensor) -> TextBatch:
        """Texts that go on from int64 [rows, T], of which `cache` has all but the last of each."""

    def loop(self) -> Loop:
        """Continues them, and returns what `generate` does. The first step that it asks for is the prompt."""


def drive(
    begin: Callable[[StepInput], Pending], loops: Sequence[Loop], then: Callable[[int], Loop | None] | None = None
) -> list[Found]:
    """What the loops return, each with a batch and a cache of its own. While the result of one is awaited, the steps of
    the others are under way, if the runner behind `begin` can have several.

    then: told the place of a loop that has ended, may give one to go on with there.
    """
    found: list[Any] = [None] * len(loops)
    with StepRanges() as steps:

        def started(request: StepInput) -> Pending:
            steps.begin(request.phase)
            return begin(request)

        under_way = deque((place, loop, started(next(loop))) for place, loop in enumerate(loops))
        while under_way:
            place, loop, step = under_way.popleft()
            try:
                request = loop.send(step.collect())
            except StopIteration as end:
                found[place] = end.value
                after = then(place) if then else None
                if after is not None:
                    under_way.append((place, after, started(next(after))))
            else:
                under_way.append((place, loop, started(request)))
    return found
