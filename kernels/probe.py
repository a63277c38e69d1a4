"""Measures how fast this machine reads memory right now, the yardstick of decode steps, and how fast it multiplies, the
yardstick of prompts and large batches.

The limit is the fastest of several ways to read, because no single way is the fastest everywhere. A probe that reads
only as the kernels do would flatter them wherever both are slow.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import count, cycle, product
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from . import build
from .memory import Arena
from .reading import READINGS

PROBE_BYTES = 384 << 20  # several times any last-level cache that a thread uses, so that the data comes from memory
STREAMS = (1, 2, 4)  # how many streams a thread may read in turns
PASSES = 2  # of every way, before the best ways are kept
KEPT = 4  # best ways
AWAKE_BYTES = 1 << 20  # read before a timed pass of a turn, which finds the threads asleep


class Way(NamedTuple):
    """One way to read."""

    reading: int  # prefetches, as an index into READINGS
    streams: int  # how many streams each thread reads in turns

    def __str__(self) -> str:
        return f"{READINGS[self.reading]} x{self.streams}"


WAYS = tuple(Way(*way) for way in product(range(len(READINGS)), STREAMS))


def read_bandwidth_gb_s(threads: int, seconds: float = 0.05) -> float:
    """GB/s (1e9 bytes) of reading 384 MiB with `threads` threads: the best pass of the best ways. They take turns for
    `seconds`, each at least once. The first call for a number of threads takes longer, because it finds these ways.

    The read bandwidth of a shared machine changes within seconds: call this right before or after the timed work.
    Raises BuildError if the kernels can't be compiled.
    """
    tried = best_ways(threads)
    best: dict[Way, float] = {}
    deadline = perf_counter() + seconds
    for way in cycle(tried):
        if len(best) == len(tried) and perf_counter() >= deadline:
            break
        best[way] = max(_pass_gb_s(way, threads), best.get(way, 0.0))
    fastest = max(best, key=best.__getitem__)
    _won[threads][fastest] += 1
    return best[fastest]


def rates_now_gb_s(threads: int) -> dict[Way, float]:
    """GB/s of the best ways with `threads` threads, in one short turn. Each way reads a part of the memory, and another
    part in the next turn. A single figure scatters: compare medians of many turns.
    """
    ways, turn, data = best_ways(threads), next(_turns), _buffer()
    part = data.numel() // len(ways)
    _gb_s(data[:AWAKE_BYTES], ways[0], threads)
    return {
        way: _gb_s(data[number * part : (number + 1) * part], way, threads)
        for number, way in enumerate(ways[place % len(ways)] for place in range(turn, turn + len(ways)))
    }


def fastest_of(turns: Sequence[Mapping[Way, float]], threads: int) -> Way:
    """The way with the highest median over some turns of `rates_now_gb_s`. `probe_winner` counts them."""
    fastest = max(turns[0], key=lambda way: median(rates[way] for rates in turns))
    _won[threads][fastest] += len(turns)
    return fastest


def probe_memory() -> list[Tensor]:
    """The memory that this process's probes read; empty before the first one."""
    return [_buffer()] if _buffer.cache_info().currsize else []


def peak_gflop_s(dtype: torch.dtype, threads: int, seconds: float = 0.05) -> float:
    """GFLOP/s (1e9 multiplications and additions) of `threads` threads that only multiply registers, with the
    instruction of prompts of models with weights of `dtype`. It is the fastest rate measured within `seconds`.

    Raises BuildError if the kernels can't be compiled.
    """
    library = build.load(str(dtype).removeprefix("torch."))
    return float(library.labkit_peak_flop_ms(threads, int(seconds * 1e9))) / 1e6


def rates_gb_s(threads: int, passes: int = PASSES) -> dict[Way, float]:
    """GB/s of every way: the best of `passes` passes. The ways take turns."""
    rates = dict.fromkeys(WAYS, 0.0)
    for way in WAYS * passes:
        rates[way] = max(rates[way], _pass_gb_s(way, threads))
    return rates


@cache
def best_ways(threads: int) -> tuple[Way, ...]:
    """The fastest ways of this process's first measurement, the fastest first."""
    rates = rates_gb_s(threads)
    return tuple(sorted(rates, key=rates.__getitem__, reverse=True)[:KEPT])


def probe_winner(threads: int) -> str:
    """The way that set the limit most often, and in how many of this process's probes; empty without probes."""
    won = _won[threads]
    if not won:
        return ""
    way, times = won.most_common(1)[0]
    return f"{way}, the fastest in {times} of {won.total()} probes"


_won: defaultdict[int, Counter[Way]] = defaultdict(Counter)  # by threads
_turns = count()


def _pass_gb_s(way: Way, threads: int) -> float:
    return _gb_s(_buffer(), way, threads)


def _gb_s(data: Tensor, way: Way, threads: int) -> float:
    library = build.in_use("float32")
    return data.numel() / library.labkit_read_ns(data.data_ptr(), data.numel(), threads, way.reading, way.streams)


@cache
def _buffer() -> Tensor:
    return Arena.reserved(PROBE_BYTES).empty((PROBE_BYTES,), torch.uint8).fill_(1)
