"""Schedules: the order in which micro-batches begin their next tokens. All begin the prompts one after the other.

A schedule takes the function that begins a step, and a loop for each micro-batch. It returns the results of the loops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from labkit.engine.runners.driving import Generated, Loop, drive
from labkit.engine.runners.step import Pending, StepInput
from labkit.stages import StepRanges

Begin: TypeAlias = Callable[[StepInput], Pending]
Schedule: TypeAlias = Callable[[Begin, Sequence[Loop]], list[Generated]]


def rounds(begin: Begin, loops: Sequence[Loop]) -> list[Generated]:
    """Runs all micro-batches in turn. One that has ended keeps its turn, with useless steps, until all have ended."""
    results: list[Any] = [None] * len(loops)
    with StepRanges() as ranges:
        requests = [next(loop) for loop in loops]
        under_way = [_begun(begin, request, ranges) for request in requests]
        going = set(range(len(loops)))
        while True:
            for index, loop in enumerate(loops):
                output = under_way[index].collect()
                if index in going:
                    try:
                        requests[index] = loop.send(output)
                    except StopIteration as end:
                        results[index] = end.value
                        going.remove(index)
                        requests[index] = _idle(requests[index])
                if not going:
                    return results
                under_way[index] = _begun(begin, requests[index], ranges)


def barrier(begin: Begin, loops: Sequence[Loop]) -> list[Generated]:
    """Runs all micro-batches. None begins a token before all have the token before."""
    results: list[Any] = [None] * len(loops)
    with StepRanges() as ranges:
        requests = {index: next(loop) for index, loop in enumerate(loops)}
        while requests:
            under_way = {index: _begun(begin, request, ranges) for index, request in requests.items()}
            outputs = {index: pending.collect() for index, pending in under_way.items()}
            requests = {}
            for index, output in outputs.items():
                try:
                    requests[index] = loops[index].send(output)
                except StopIteration as end:
                    results[index] = end.value
    return results


def _begun(begin: Begin, request: StepInput, ranges: StepRanges) -> Pending:
    ranges.begin(request.phase)
    return begin(request)


def _idle(request: StepInput) -> StepInput:
    """Returns a step as long as the last one, for a micro-batch that has ended."""
    return StepInput(torch.zeros(request.shape[0], 1, dtype=torch.int64), request.cache, greedy=True, follows=True)


SCHEDULES: Mapping[str, Schedule] = {"queue": drive, "rounds": rounds, "barrier": barrier, "naive": drive}
