"""Ranks that are about to share a model: each posts its data in the store of the run, or the reason why it failed.

In a collective of torch.distributed the other ranks would wait for a rank that failed before the collective.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from labkit.kernels.other_ranks import TOGETHER, LostRankError, RankFailedError
from labkit.kernels.shared_memory import system
from labkit.launcher.meeting import attempts, excuse, reason_of
from labkit.system.process_state import ENDED, process_state

TIMEOUT_S = 600.0
PAUSE_S = 0.002  # between two looks at the store
LOOK_S = 0.2  # between two checks that the missing ranks are alive
PROCESS = "labkit/process/{}"

_calls: defaultdict[tuple[int, ...], int] = defaultdict(int)  # number of joins so far, by the ranks of a group


def reason_for_others(error: BaseException) -> str:
    """The message for the other ranks, on one line. A message from another rank is passed on unchanged."""
    if isinstance(error, RankFailedError | LostRankError):
        return " ".join(str(error).split())
    return reason_of(error, dist.get_rank())


def say_process() -> None:
    """Posts this process's id in the store of the run, so that other ranks can check whether it has ended."""
    _store().set(PROCESS.format(dist.get_rank()), json.dumps([*system(), os.getpid()]))


@contextmanager
def joining(group: dist.ProcessGroup | None) -> Iterator[None]:
    """An error inside this context is also raised on the other ranks of `group` (None: all), unless this rank has
    joined them before. Without a process group, it is raised on the ranks that wait for one.
    """
    before = _calls[tuple(dist.get_process_group_ranks(group))] if dist.is_initialized() else 0
    met_before = attempts()
    try:
        yield
    except BaseException as error:
        if not dist.is_initialized():
            if attempts() == met_before:
                excuse(error)
            raise
        ranks = dist.get_process_group_ranks(group)
        if _calls[tuple(ranks)] == before:
            _calls[tuple(ranks)] += 1
            with suppress(RuntimeError):  # the store may be lost
                _of_call(ranks, before).set(f"failed/{dist.get_rank()}", reason_for_others(error))
        raise


def join(data: str, group: dist.ProcessGroup | None) -> list[str]:
    """Posts `data`, waits for the other ranks of `group`, and returns the data of all, in order of the ranks.

    Raises RankFailedError with the reason of a rank that failed before it joined; LostRankError if a rank has ended or
    does not join in time.
    """
    ranks, me = dist.get_process_group_ranks(group), dist.get_rank()
    store = _of_call(ranks, _calls[tuple(ranks)])
    _calls[tuple(ranks)] += 1
    try:
        store.set(f"here/{me}", data)
        begun = looked = time.monotonic()
        while missing := [rank for rank in ranks if not store.check([f"here/{rank}"])]:
            for rank in missing:
                if store.check([f"failed/{rank}"]):
                    raise RankFailedError(store.get(f"failed/{rank}").decode())
            if (now := time.monotonic()) - looked > LOOK_S:
                looked = now
                _require_alive(missing, me, now - begun)
            time.sleep(PAUSE_S)
        return [store.get(f"here/{rank}").decode() for rank in ranks]
    except dist.DistError as error:
        raise LostRankError(f"rank {me}: the store of the run is lost: {error}; {TOGETHER}") from error


def _require_alive(ranks: list[int], me: int, waited_s: float) -> None:
    store = _store()
    for rank in ranks:
        if store.check([PROCESS.format(rank)]):
            *where, pid = json.loads(store.get(PROCESS.format(rank)))
            if where == list(system()) and process_state(pid) in ENDED:
                raise LostRankError(f"rank {me}: rank {rank} has ended; {TOGETHER}")
    if waited_s > TIMEOUT_S:
        raise LostRankError(f"rank {me}: rank {ranks[0]} did not come within {TIMEOUT_S:.0f} s; {TOGETHER}")


def _of_call(ranks: list[int], number: int) -> dist.Store:
    return dist.PrefixStore(f"labkit/joining/{'-'.join(map(str, ranks))}/{number}", _store())


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()  # the only access to the store of a group made elsewhere
