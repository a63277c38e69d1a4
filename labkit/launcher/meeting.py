"""The ranks of a run wait for each other before they compute, and name the ranks that did not come."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist

from labkit.launcher.start import not_met
from labkit.system.errors import RunError

HERE = "labkit/here/{}"
LEAST_S = 0.001  # torch takes 0 for no limit


def meet(store: dist.Store, rank: int, ranks: int, timeout_s: float) -> None:
    """Returns when all `ranks` have called it. After `timeout_s` raises RunError with the ranks that are missing."""
    deadline = time.monotonic() + timeout_s
    store.set(HERE.format(rank), "1")
    for awaited in range(ranks):
        try:
            store.wait([HERE.format(awaited)], timedelta(seconds=max(deadline - time.monotonic(), LEAST_S)))
        except RuntimeError:  # a file store raises this instead of DistError
            if missing := [other for other in range(ranks) if not store.check([HERE.format(other)])]:
                raise RunError(not_met(missing, timeout_s)) from None
