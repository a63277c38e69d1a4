"""The ranks of a run wait for each other before they compute, and say who did not come."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist

from labkit.launcher.start import not_met
from labkit.system.errors import RunError

HERE = "labkit/here/{}"
LEAST_S = 0.001  # torch takes 0 for no limit


def meet(store: dist.Store, rank: int, ranks: int, timeout_s: float) -> None:
    """Returns when all `ranks` have called it. Raises RunError that names those that have not after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    store.set(HERE.format(rank), "1")
    for other in range(ranks):
        try:
            store.wait([HERE.format(other)], timedelta(seconds=max(deadline - time.monotonic(), LEAST_S)))
        except RuntimeError:  # a store of files raises no DistError
            if missing := [each for each in range(ranks) if not store.check([HERE.format(each)])]:
                raise RunError(not_met(missing, timeout_s)) from None
