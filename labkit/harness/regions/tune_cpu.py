"""`labkit tune` on a CPU: times of a decode step with each way of reading the weights, and the read rate of each way.

Nothing is stored, because engines time the ways on their own steps and choose again when the machine changes. This
shows the choices that they have. All ways read the same weights, which lie in new memory in each epoch, so that a way
does not win by their place.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns

import numpy as np
import torch

from labkit.engine import init_inference
from labkit.engine.runners.one_call import OneCallRunner
from labkit.engine.runners.runner import Runner
from labkit.engine.runners.step import StepInput
from labkit.engine.runners.watched import WatchedRunner
from labkit.engine.team_size import team_size
from labkit.harness.compare.plan import Schedule, check_schedule
from labkit.harness.turns.calls import CallEpochs, CallRounds
from labkit.harness.turns.pages import large_tensors
from labkit.kernels.probe import STREAMS, Way, rates_gb_s
from labkit.kernels.reading import READINGS
from labkit.models.dtypes import dtype_of
from labkit.statistics import Ratio
from labkit.statistics.sequential import EPOCHS, planned_ratio
from labkit.system.bounds import check_numbers
from labkit.system.progress import Progress, unheard
from labkit.weights.resolve import resolve

CONTEXT = 128
ROUNDS = 5  # epochs
PASSES = 3  # of each plain reader


@dataclass(frozen=True)
class TimedWay:
    """Times of a way of reading the weights."""

    name: str
    step_ms: float  # median of a decode step
    over_none: Ratio  # its time / the time of the way "none"
    read_gb_s: dict[int, float]  # rate of a plain reader, by streams per thread


def time_ways(
    model: str, *, dtype: str = "float32", batch: int = 1, rounds: int = ROUNDS, progress: Progress | None = None
) -> tuple[TimedWay, ...]:
    """Times decode steps of `batch` sequences of a model. The ways take turns, in random order, in `rounds` epochs.

    ValueError for an unknown model or dtype, for no sequence, and for fewer than two epochs.
    """
    check_numbers(batch=batch)
    schedule = Schedule(rounds=rounds)
    check_schedule(schedule)
    weight_dtype = dtype_of(dtype)
    follow = progress or unheard
    follow(0, rounds + 1, f"building {model} {dtype}")
    engine = init_inference(resolve(model), dtype=weight_dtype, impl="cpp")
    runner = _one_call(engine.module.runner)
    cache = runner.layer_range.new_cache()
    prompt, following = (torch.ones(batch, tokens, dtype=torch.int64) for tokens in (CONTEXT, 1))
    runner.begin(StepInput(prompt, cache, greedy=True))

    def step_ns(way: int) -> int:
        runner.readings.fix(way)
        begun = perf_counter_ns()
        runner.begin(StepInput(following, cache, greedy=True, follows=True))
        taken = perf_counter_ns() - begun
        cache.crop(CONTEXT)
        return taken

    epochs = CallEpochs([partial(step_ns, way) for way in range(len(READINGS))], large_tensors())
    measured = epochs.run(schedule, progress=follow)
    follow(rounds + 1, rounds + 1, "plain readers")
    return _timed(measured, rates_gb_s(team_size(), PASSES))


def _timed(measured: CallRounds[int], rates: dict[Way, float]) -> tuple[TimedWay, ...]:
    taken_ns = np.array(measured.results).T  # [way, round]
    return tuple(
        TimedWay(
            name=READINGS[reading],
            step_ms=float(np.median(taken)) / 1e6,
            over_none=planned_ratio(measured.epoch_centres(np.log(taken / taken_ns[0])), EPOCHS),
            read_gb_s={streams: rates[Way(reading, streams)] for streams in STREAMS},
        )
        for reading, taken in enumerate(taken_ns)
    )


def _one_call(runner: Runner) -> OneCallRunner:
    fast = runner.fast if isinstance(runner, WatchedRunner) else runner
    assert isinstance(fast, OneCallRunner)
    return fast
