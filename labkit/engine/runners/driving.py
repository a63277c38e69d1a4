"""Loops that request steps until a text ends, and a driver that runs one or several of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from torch import Tensor

from labkit.engine.memory.kv_cache import KVCache
from labkit.engine.runners.step import Pending, StepInput, StepOutput
from labkit.stages import Phase, StepRanges

if TYPE_CHECKING:
    from transformers.generation import GenerateDecoderOnlyOutput

Generated: TypeAlias = "Tensor | GenerateDecoderOnlyOutput"
Loop: TypeAlias = Generator[StepInput, StepOutput, Generated]


class TextBatch(Protocol):
    """Texts to continue: the rows of one call of `generate`.

    cache: empty, or with the first tokens of the rows.
    rows: number of rows.
    pad: token after the end of a text.
    wants_tokens_alone: the caller needs no scores, logits or cache, and no tokens before all are complete. No text may
    have to begin anew.
    together: reason why the rows can't be divided; None: each row can be continued without the others.
    asked: all other arguments of the call, in a form that ranks compare.
    ends: end tokens after which a row can leave the batch; None: rows stay until all have ended.
    draws: tokens are drawn at random, one row after the other.
    longest: most tokens of a text, with the prompt; None: unknown.
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
        """int64 [rows, T]: the first tokens of the texts."""

    def part(self, rows: range, cache: KVCache) -> TextBatch:
        """Returns some of the rows, with a cache of their own."""

    def continued(self, tokens: Tensor) -> TextBatch:
        """Returns texts that continue int64 [rows, T]. `cache` has all these tokens except the last of each row."""

    def loop(self, *, alone: bool = False) -> Loop:
        """Continues the texts, and returns the result of `generate`. The first step that it requests is the prompt.

        alone: the steps have no cache besides `cache`, so equal rows of the prompt can be read once, and a text that
        outgrows its rotation can begin anew.
        """


def drive(
    begin: Callable[[StepInput], Pending],
    loops: Sequence[Loop],
    then: Callable[[int], Loop | None] | None = None,
    *,
    used: Callable[[Phase, int], None] | None = None,
) -> list[Generated]:
    """Runs the loops, each with its own batch and cache, and returns their results. While one loop waits for its step,
    steps of other loops are under way, if the runner of `begin` allows several.

    then: called with the index of a loop that has ended; may return a loop that continues at this index.
    used: called with the phase of each step, and the nanoseconds in which its loop used its results.
    """
    results: list[Any] = [None] * len(loops)
    with StepRanges() as steps:

        def started(request: StepInput) -> tuple[Phase, Pending]:
            phase = request.phase
            steps.begin(phase)
            return phase, begin(request)

        under_way = deque((index, loop, *started(next(loop))) for index, loop in enumerate(loops))
        while under_way:
            index, loop, phase, step = under_way.popleft()
            output, begin_ns = step.collect(), perf_counter_ns()
            try:
                request = loop.send(output)
            except StopIteration as end:
                results[index] = end.value
                after = then(index) if then else None
                if after is not None:
                    under_way.append((index, after, *started(next(after))))
                continue
            finally:
                if used is not None:
                    used(phase, perf_counter_ns() - begin_ns)
            under_way.append((index, loop, *started(request)))
    return results
