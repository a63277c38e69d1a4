"""Trial of an edited kernel: it is compiled, judged on newly drawn layers, and raced against torch's unfused ops.

The library runs in the judge's confined process alone (`labkit.harness.judge`), so a kernel that crashes, never ends or
forges results does no harm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from secrets import randbits
from time import perf_counter

import numpy as np
import torch

from labkit.engine.team_size import team_size, torch_threads
from labkit.harness.judge.arrays import SharedArrays
from labkit.harness.judge.judge import Finding, Question, Task, check, race
from labkit.harness.judge.judged_process import Submission
from labkit.harness.regions.drawn_layers import RegionShape, drawn_layer
from labkit.harness.regions.region_questions import FUNCTIONS, RegionCase, region_case
from labkit.harness.regions.vocabulary import OP_OF
from labkit.kernels.build import BuildError, compile_library
from labkit.kernels.types import Heads
from labkit.models.dtypes import dtype_of
from labkit.stages import Stage
from labkit.system.errors import UserError
from labkit.system.nearest import did_you_mean

CHECKED_CALLS, MOST_BATCH, MOST_PAST = 64, 3, 40
TIMED = RegionShape(768, Heads(12, 12, 64), 3072)  # of gpt2
TIMED_CALLS, TIMED_LAYERS, TIMED_PAST = 96, 12, 128  # more layers than the caches hold


@dataclass(frozen=True)
class Trial:
    """Result of a kernel's trial."""

    region: str
    problem: str | None = None  # None: the kernel is right
    fused_us: float | None = None  # microseconds of a call
    unfused_us: float | None = None
    gain: str = ""  # unfused / fused, with its interval
    in_force: tuple[str, ...] = ()  # measures that confined the kernel


def try_kernel(
    region: str, *, dtype: str = "float32", threads: int | None = None, seed: int | None = None, timed: bool = True
) -> Trial:
    """Compiles the kernels from their present sources and tries `region` on newly drawn layers and rows.

    seed: of what is drawn; None: a new one. timed: whether a right kernel is raced. UserError for an unknown region or
    dtype.
    """
    if region not in OP_OF:
        raise UserError(f"unknown op {region!r}{did_you_mean(region, OP_OF)}; expected one of {', '.join(OP_OF)}")
    of, weights = Stage(region), dtype_of(dtype)
    threads = team_size() if threads is None else threads
    try:
        library = compile_library(dtype)
    except BuildError as error:
        return Trial(region, str(error))
    function, kinds = FUNCTIONS[of]
    submission = Submission(library, function, kinds=kinds, threads=threads)
    rng = np.random.default_rng(randbits(64) if seed is None else seed)
    checked = _Drawn(of, weights, threads)
    finding = check(submission, Task(checked.small, checked.unfused_s), rng)
    if not finding.right:
        return Trial(region, finding.problem, in_force=finding.in_force)
    if not timed:
        return Trial(region, in_force=finding.in_force)
    raced = _Drawn(of, weights, threads)
    reader = None if of is Stage.RESIDUAL else SharedArrays.read_s  # its few rows stay in the caches
    speed = race(submission, Task(raced.as_gpt2, raced.unfused_s, reader), rng)
    if isinstance(speed, Finding):
        return Trial(region, speed.problem, in_force=speed.in_force)
    fused_us = speed.round_s / TIMED_CALLS * 1e6
    return Trial(region, None, fused_us, fused_us * speed.ratio.value, str(speed.ratio), finding.in_force)


class _Drawn:
    """The calls of a round that was drawn, for the judge and for torch's ops."""

    def __init__(self, region: Stage, dtype: torch.dtype, threads: int) -> None:
        self._case = partial(region_case, region, threads=threads)
        self._dtype, self._threads = dtype, threads
        self._cases: list[RegionCase] = []

    def small(self, rng: np.random.Generator) -> Sequence[Question]:
        """Layers of many shapes, whose sizes no tile divides."""
        for number in range(CHECKED_CALLS):
            kv, dim = int(rng.integers(1, 4)), 2 * int(rng.integers(2, 12))
            heads = Heads(kv * int(rng.integers(1, 4)), kv, dim)
            shape = RegionShape(int(rng.integers(2, 90)), heads, int(rng.integers(2, 130)), llama=number % 2 == 1)
            batch, past = int(rng.integers(1, MOST_BATCH + 1)), int(rng.integers(MOST_PAST))
            self._cases.append(self._case(shape, drawn_layer(shape, self._dtype, rng), rng, batch=batch, past=past))
        return [of.question for of in self._cases]

    def as_gpt2(self, rng: np.random.Generator) -> Sequence[Question]:
        """Calls whose weights come from memory, as in a decode step."""
        layers = [drawn_layer(TIMED, self._dtype, rng) for _ in range(TIMED_LAYERS)]
        self._cases = [
            self._case(TIMED, layers[number % TIMED_LAYERS], rng, batch=1, past=TIMED_PAST)
            for number in range(TIMED_CALLS)
        ]
        return [of.question for of in self._cases]

    def unfused_s(self, _: SharedArrays) -> float:
        """Seconds of torch's ops for all calls."""
        with torch_threads(self._threads), torch.inference_mode():
            begin = perf_counter()
            for of in self._cases:
                of.unfused()
            return perf_counter() - begin
