"""One rank's part in timing sums over ranks. Both ways take turns in the same processes."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from labkit.harness.exchange.records import WAYS
from labkit.harness.rounds import random_orders
from labkit.kernels.all_reduce import Exchange, all_reduce

UNTIMED = 5  # calls at the beginning of a block, until the way is warm and the ranks are in step


class ExchangeCalls:
    """This rank's parts of `sizes` bytes, and its exchange with other ranks. All ranks create it at the same time."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.exchange = Exchange(None, max(sizes))
        generator = torch.Generator().manual_seed(self.exchange.rank)
        self._parts = {size: torch.randn(size // 4, generator=generator) for size in sizes}
        for size in sizes:
            ours, theirs = (all_reduce(self._parts[size], self.exchange, impl=impl) for impl in WAYS)
            if not torch.allclose(ours, theirs, atol=1e-5):
                raise RuntimeError(f"sums of {size} bytes differ by {(ours - theirs).abs().max():.2g}")

    def round(self, *, calls: int, seed: int) -> list[dict[str, Any]]:
        """Times `calls` successive calls of every size and way, in the same random order on all ranks."""
        blocks = [(size, impl) for size in self._parts for impl in WAYS]
        order = next(random_orders(len(blocks), seed=seed))
        return [self._block(size, impl, calls) for size, impl in (blocks[index] for index in order)]

    def _block(self, size: int, impl: str, calls: int) -> dict[str, Any]:
        part, exchange = self._parts[size], self.exchange
        stamps = []
        dist.barrier()
        for _ in range(UNTIMED):
            all_reduce(part, exchange, impl=impl)
        for _ in range(calls):
            stamps.append(perf_counter_ns())
            all_reduce(part, exchange, impl=impl)
        stamps.append(perf_counter_ns())
        return {"bytes": size, "impl": impl, "us": (np.diff(stamps) / 1e3).tolist()}
