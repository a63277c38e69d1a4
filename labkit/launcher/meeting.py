"""The ranks of a run wait for each other before they compute, and name the ranks that did not come.

A rank that fails before it meets the others posts the reason. The ranks try again together, so their attempts count.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from labkit.kernels.other_ranks import RankFailedError
from labkit.launcher.start import not_met
from labkit.system.errors import RunError

TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
ATTEMPTS, HERE = "labkit/attempts/{}", "labkit/here/{}/{}"
COME, FAILED = "come", "failed: "
LEAST_S = 0.001  # torch takes 0 for no limit
REACH_S = 5.0  # for a store that is gone, because its rank has ended

_attempts: list[int] = []  # of this process


def meet(store: dist.Store, rank: int, ranks: int, timeout_s: float) -> None:
    """Returns when all `ranks` have called it. Raises RankFailedError with the reason of a rank that has called
    `excuse`, and after `timeout_s` RunError with the ranks that are missing.
    """
    deadline, attempt = time.monotonic() + timeout_s, _post(store, rank, COME)
    for awaited in range(ranks):
        key = HERE.format(attempt, awaited)
        try:
            store.wait([key], timedelta(seconds=max(deadline - time.monotonic(), LEAST_S)))
        except RuntimeError:  # a file store raises this instead of DistError
            missing = [other for other in range(ranks) if not store.check([HERE.format(attempt, other)])]
            if missing:
                raise RunError(not_met(missing, timeout_s)) from None
        if (answer := store.get(key).decode()).startswith(FAILED):
            raise RankFailedError(answer.removeprefix(FAILED))


def attempts() -> int:
    """How many times this process has called `meet` or `excuse`."""
    return len(_attempts)


def excuse(error: BaseException) -> None:
    """Tells the ranks that wait in `meet` why this rank does not come. Does nothing outside of a run of ranks."""
    if any(name not in os.environ for name in TORCHRUN) or os.environ["WORLD_SIZE"] == "1":
        return
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with suppress(RuntimeError):  # the store may be gone
        store, _, _ = next(dist.rendezvous("env://", rank, ranks, timeout=timedelta(seconds=REACH_S)))
        _post(store, rank, f"{FAILED}{reason_of(error, rank)}")


def reason_of(error: BaseException, rank: int) -> str:
    """The message of a failure on `rank` for the other ranks, on one line."""
    message = " ".join(str(error).split())
    return f"rank {rank}: {type(error).__name__}" + (f": {message}" if message else "")


def _post(store: dist.Store, rank: int, text: str) -> int:
    """Posts the outcome of this rank's next attempt, and returns the attempt's number."""
    attempt = store.add(ATTEMPTS.format(rank), 1)
    _attempts.append(attempt)
    store.set(HERE.format(attempt, rank), text)
    return attempt
