"""Pairs of ways to compute the experts of rows, which take turns: sparse against dense, a table against products."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle
from time import perf_counter_ns

import numpy as np
import torch
from torch import Tensor

from labkit.harness.compare.plan import Schedule
from labkit.harness.environment import read_environment
from labkit.harness.roofline import probe_turn
from labkit.harness.turns.calls import CallEpochs, CallRounds
from labkit.kernels.checks import unchecked
from labkit.kernels.decode_step import MixtureMlp
from labkit.kernels.experts import experts as checked_experts
from labkit.kernels.experts.one_hot import through_one_hot, through_table
from labkit.kernels.memory import Arena
from labkit.kernels.mlp_gemm import mlp as checked_mlp
from labkit.kernels.types import NO_NORM, Linear, MlpWeights
from labkit.models.config import ModelConfig
from labkit.studies.experts_study import TimedPair
from labkit.system.progress import Progress
from labkit.weights.canonical import RowBlocks
from labkit.weights.packing import Packer

ROUTED = 512  # rows on their way to experts
DRAWN = 64  # choices of a row
AWAY_FROM_CACHES = 256 << 20  # bytes of MLPs that calls read in turn
experts, mlp = unchecked(checked_experts), unchecked(checked_mlp)
Call = Callable[[], object]


def sparse_and_dense(
    mixtures: Sequence[MixtureMlp], config: ModelConfig, threads: int, schedule: Schedule, follow: Progress
) -> TimedPair:
    """The experts of one row against a dense MLP of their width together. Both read memory that no cache holds."""
    spec = config.experts
    assert spec is not None
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, config.hidden_size, generator=generator)
    dense = _dense_mlps(mixtures[0], config)
    shares = torch.full((1, spec.chosen), 1 / spec.chosen)
    drawn = [torch.randperm(spec.count, generator=generator)[None, : spec.chosen].contiguous() for _ in range(DRAWN)]
    next_choice = cycle([(mixture.experts, chosen) for chosen in drawn for mixture in mixtures])
    next_mlp = cycle(dense)

    def sparse() -> Tensor:
        of_layer, chosen = next(next_choice)
        return experts(hidden, chosen, shares, of_layer, threads=threads, impl="cpp")

    def all_rows() -> Tensor:
        region, out = next(next_mlp)
        return mlp(hidden, region, out, threads=threads, impl="cpp")

    tensors = [matrix.weight for region, out in dense for matrix in (region.up, out)]
    tensors += [stack.weight for mixture in mixtures for stack in (mixture.ups, mixture.outs)]
    return _in_turns({"a dense MLP": all_rows, "experts": sparse}, tensors, threads, schedule, follow)


def _dense_mlps(mixture: MixtureMlp, config: ModelConfig) -> list[tuple[MlpWeights, Linear]]:
    """Dense MLPs of random numbers, as wide as the experts of a row together, beyond what caches hold."""
    assert config.experts is not None
    hidden, inner = config.hidden_size, config.experts.chosen * config.intermediate_size
    wide = inner * (2 if config.gated else 1)
    size = (wide + inner) * hidden * mixture.ups.weight.element_size()
    count = max(2, AWAY_FROM_CACHES // size)
    place = Arena.reserved(count * (size + (1 << 20)))
    packer = Packer("cpp", mixture.ups.weight.dtype, 16, place)
    generator = torch.Generator().manual_seed(1)

    def matrix(rows: int, columns: int, *, gated: bool = False) -> Linear:
        numbers = torch.randn(rows, columns, generator=generator) * columns**-0.5
        return packer.matrix(RowBlocks.of(numbers.to(mixture.ups.weight.dtype)), None, gated=gated)

    return [
        (
            MlpWeights(NO_NORM, matrix(wide, hidden, gated=config.gated), config.activation, config.gated),
            matrix(hidden, inner),
        )
        for _ in range(count)
    ]


def routing(config: ModelConfig, threads: int, schedule: Schedule, follow: Progress) -> TimedPair:
    """Rows on their way to experts and back by one-hot products, and by a table. Both are torch's operations."""
    spec = config.experts
    assert spec is not None
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROUTED, config.hidden_size, generator=generator)
    logits = torch.randn(ROUTED, spec.count, generator=generator)
    shares, chosen = logits.softmax(-1).topk(spec.chosen)
    slow, fast = (partial(way, hidden, chosen, shares, spec.count) for way in (through_one_hot, through_table))
    return _in_turns({"one-hot products": slow, "a table": fast}, [hidden], threads, schedule, follow)


def _in_turns(
    sides: Mapping[str, Call], tensors: Sequence[Tensor], threads: int, schedule: Schedule, follow: Progress
) -> TimedPair:
    """Measures two sides, the slow one first, until the schedule's end or a trustworthy verdict."""
    environment = read_environment(threads)

    def pair(measured: CallRounds[float]) -> TimedPair:
        by_side = zip(sides, np.transpose(measured.results).tolist(), strict=True)
        return TimedPair(environment=environment, rounds_us=dict(by_side), **measured.conditions)

    calls = [partial(_call_us, call) for call in sides.values()]
    epochs = CallEpochs(calls, tensors, probe=partial(probe_turn, threads), threads=threads)
    measured = epochs.run(
        schedule,
        answered=lambda measured: (found := pair(measured)).trust.decides(found.gain),
        words=lambda measured: f"{' / '.join(sides)} {pair(measured).gain}",
        progress=follow,
    )
    return pair(measured)


def _call_us(call: Call) -> float:
    with torch.inference_mode():
        start = perf_counter_ns()
        call()
        return (perf_counter_ns() - start) / 1e3
