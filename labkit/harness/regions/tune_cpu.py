"""`labkit tune` on a CPU: times of a decode step with each way of reading the weights, and the read rate of each way.

Nothing is stored, because engines time the ways on their own steps and choose again when the machine changes. This
shows the choices that they have.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from time import perf_counter_ns

import torch

from labkit.engine import init_inference
from labkit.engine.runners.one_call import OneCallRunner
from labkit.engine.runners.runner import Runner
from labkit.engine.runners.step import StepInput
from labkit.engine.runners.watched import WatchedRunner
from labkit.harness.rounds import random_orders
from labkit.kernels.probe import STREAMS, Way, rates_gb_s
from labkit.kernels.reading import READINGS
from labkit.models.dtypes import dtype_of
from labkit.system.bounds import check_numbers
from labkit.system.progress import Progress, unheard
from labkit.weights.resolve import resolve

CONTEXT = 128
ROUNDS = 21
PASSES = 3  # of each plain reader


@dataclass(frozen=True)
class TimedWay:
    """Times of a way of reading the weights."""

    name: str
    step_ms: float  # median of a decode step
    over_none: float  # median of its time / the time of the way "none" in the same round
    read_gb_s: dict[int, float]  # rate of a plain reader, by streams per thread


def time_ways(
    model: str,
    *,
    dtype: str = "float32",
    batch: int = 1,
    rounds: int = ROUNDS,
    progress: Progress | None = None,
) -> tuple[TimedWay, ...]:
    """Times decode steps of `batch` sequences of a model. The ways take turns, in a random order in each round.

    ValueError for an unknown model or dtype, and for fewer than one sequence or round.
    """
    check_numbers(batch=batch, rounds=rounds)
    weight_dtype = dtype_of(dtype)
    follow, total = progress or unheard, len(READINGS) * rounds
    follow(0, total, f"building {model} {dtype}")
    engine = init_inference(resolve(model), dtype=weight_dtype, impl="cpp")
    runner = _one_call(engine.module.runner)
    cache = runner.new_cache()
    prompt, following = (torch.ones(batch, tokens, dtype=torch.int64) for tokens in (CONTEXT, 1))
    runner.begin(StepInput(prompt, cache, greedy=True))
    times: dict[int, list[int]] = {way: [] for way in range(len(READINGS))}
    for index, order in zip(range(rounds), random_orders(len(READINGS)), strict=False):
        for done, way in enumerate(order):
            follow(index * len(READINGS) + done, total, f"{READINGS[way]}, round {index + 1}")
            runner.readings.fix(way)
            begun = perf_counter_ns()
            runner.begin(StepInput(following, cache, greedy=True, follows=True))
            times[way].append(perf_counter_ns() - begun)
            cache.crop(CONTEXT)
    follow(total, total, "plain readers")
    return _timed(times, rates_gb_s(torch.get_num_threads(), PASSES))


def _timed(times: dict[int, list[int]], rates: dict[Way, float]) -> tuple[TimedWay, ...]:
    return tuple(
        TimedWay(
            name=READINGS[reading],
            step_ms=median(taken) / 1e6,
            over_none=median(way_ns / none_ns for way_ns, none_ns in zip(taken, times[0], strict=True)),
            read_gb_s={streams: rates[Way(reading, streams)] for streams in STREAMS},
        )
        for reading, taken in times.items()
    )


def _one_call(runner: Runner) -> OneCallRunner:
    fast = runner.fast if isinstance(runner, WatchedRunner) else runner
    assert isinstance(fast, OneCallRunner)
    return fast
