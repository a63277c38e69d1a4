"""Measures how fast this GPU reads its memory right now: the yardstick of every decode step on it."""

from functools import cache
from itertools import pairwise
from time import perf_counter

import torch
import triton
import triton.language as tl
from torch import Tensor

PROBE_BYTES = 4 << 30  # dozens of times any GPU's cache
PASSES = 4  # queued at once
BLOCK, STEPS, WARPS = 4096, 8, 8  # with these, the machine code has several loads of 16 bytes in flight per thread
NUMBERS = BLOCK * STEPS  # numbers that one program reads


@triton.jit
def _sum_blocks(sums_ptr, data_ptr, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    program = tl.program_id(0)
    at = program.to(tl.int64) * (BLOCK * STEPS) + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    for step in range(STEPS):
        total += tl.load(data_ptr + at + step * BLOCK)
    tl.store(sums_ptr + program, tl.sum(total))


def read(data: Tensor, sums: Tensor) -> None:
    """Reads all of `data`, int32 [n * NUMBERS], and writes the sums of its n parts, so that no load is left out."""
    _sum_blocks[(len(sums),)](sums, data, BLOCK=BLOCK, STEPS=STEPS, num_warps=WARPS)


def read_bandwidth_gb_s(seconds: float = 0.05) -> float:
    """GB/s (1e9 bytes) of reading 4 GiB, or an eighth of a smaller memory, on the current GPU: the best pass that
    begins within `seconds`, by the GPU's own clock.
    """
    data, sums = _buffers(torch.cuda.current_device())
    deadline = perf_counter() + seconds
    best_ms = float("inf")
    while best_ms == float("inf") or perf_counter() < deadline:
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(PASSES + 1)]
        for end in ends:  # the first pass is not timed: the other passes are queued while it runs, so none waits
            read(data, sums)
            end.record()
        ends[-1].synchronize()
        best_ms = min(best_ms, *(begin.elapsed_time(end) for begin, end in pairwise(ends)))
    return data.nbytes / best_ms / 1e6


@cache
def _buffers(device: int) -> tuple[Tensor, Tensor]:
    size = min(PROBE_BYTES, torch.cuda.get_device_properties(device).total_memory // 8)
    programs = size // (4 * NUMBERS)
    data = torch.ones(programs * NUMBERS, dtype=torch.int32, device=device)
    return data, torch.empty(programs, dtype=torch.int32, device=device)
