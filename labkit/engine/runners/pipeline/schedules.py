"""When the next token of each micro-batch is begun. All begin the prompts one after the other; then they differ.

A schedule takes what begins a step, and a loop for each micro-batch, and gives what the loops return.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from labkit.engine.runners.driving import Found, Loop, drive
from labkit.engine.runners.step import Pending, StepInput
from labkit.stages import StepRanges

Begin: TypeAlias = Callable[[StepInput], Pending]
Schedule: TypeAlias = Callable[[Begin, Sequence[Loop]], list[Found]]


def rounds(begin: Begin, loops: Sequence[Loop]) -> list[Found]:
    """All micro-batches in turn. One that has ended keeps its turn, and its steps come to nothing, until all have."""
    found: list[Any] = [None] * len(loops)
    with StepRanges() as ranges:
        requests = [next(loop) for loop in loops]
        under_way = [_begun(begin, request, ranges) for request in requests]
        going = set(range(len(loops)))
        while True:
            for place, loop in enumerate(loops):
                output = under_way[place].collect()
                if place in going:
                    try:
                        requests[place] = loop.send(output)
                    except StopIteration as end:
                        found[place] = end.value
                        going.remove(place)
                        requests[place] = _idle(requests[place])
                if not going:
                    return found
                under_way[place] = _begun(begin, requests[place], ranges)


def barrier(begin: Begin, loops: Sequence[Loop]) -> list[Found]:
    """No micro-batch begins a token before all have theirs."""
    found: list[Any] = [None] * len(loops)
    with StepRanges() as ranges:
        requests = {place: next(loop) for place, loop in enumerate(loops)}
        while requests:
            under_way = {place: _begun(begin, request, ranges) for place, request in requests.items()}
            outputs = {place: pending.collect() for place, pending in under_way.items()}
            requests = {}
            for place, output in outputs.items():
                try:
                    requests[place] = loops[place].send(output)
                except StopIteration as end:
                    found[place] = end.value
    return found


def _begun(begin: Begin, request: StepInput, ranges: StepRanges) -> Pending:
    ranges.begin(request.phase)
    return begin(request)


def _idle(request: StepInput) -> StepInput:
    """A step as long as the last one, whose result nobody wants."""
    return StepInput(torch.zeros(request.shape[0], 1, dtype=torch.int64), request.cache, greedy=True, follows=True)


SCHEDULES: Mapping[str, Schedule] = {"queue": drive, "rounds": rounds, "barrier": barrier, "naive": drive}
