"""Runs a function on all ranks of a model: one call from a notebook or a script, which returns the results by rank.

Every rank is a fresh Python process that ends with the call. A failure of one rank ends them all: the others cannot
finish without it, and most would wait in a collective for ever.
"""

from __future__ import annotations

import functools
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from labkit.launcher.command import FOLDERS, World, environment
from labkit.launcher.failure import RankFailure, to_blame
from labkit.launcher.rank_process import CALL, RankError, RankProcess
from labkit.launcher.start import not_met, start_timeout
from labkit.launcher.stopped import LOOK_S, StoppedRanks, stands_still
from labkit.system.bounds import check_numbers
from labkit.system.errors import UserError
from labkit.system.owned_folder import owned_folder
from labkit.system.pickled_call import pickle_call

POLL_S = 0.05
GRACE_S = 1.0  # for the cause of a lost connection to show
LINGER_S = 5.0  # for a rank to end once its result is there
STACK_S = 0.5  # for a rank to write its stack


def launch(
    function: Callable[..., Any],
    /,
    *args: Any,
    tp_size: int | None = None,
    pp_size: int | None = None,
    threads: int | None = None,
    timeout_s: float | None = None,
    start_timeout_s: float | None = None,
    pin: bool = True,
    echo: Callable[[str], None] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Calls `function(*args, **kwargs)` in several new processes at once, and returns their results by rank.

    The number of processes is tp_size * pp_size; a missing size is 1. Without both sizes there are 2 processes. Each
    initialises torch.distributed before the call, with NCCL if there is a GPU for every rank. Functions of notebook
    cells and lambdas work; arguments and results are pickled, tensors exactly. To pass `function` an argument with the
    name of a parameter below, use functools.partial.

    - tp_size, pp_size: sizes of tensor and pipeline parallelism.
    - threads: of each rank; by default OMP_NUM_THREADS, else the rank's share of the processors.
    - timeout_s: limit for the whole call.
    - start_timeout_s: limit until the ranks have met; by default LABKIT_START_TIMEOUT, else 60 s.
    - pin: keeps each rank on its share of the processors.
    - echo: is called with each line that a rank prints, after "[rank 0] "; by default lines go to sys.stdout.

    Raises RankError for the rank that failed first, was stopped, or did not meet the others in time; TimeoutError after
    `timeout_s`, with the stack of each unfinished rank; ValueError for impossible sizes, and for a function that cannot
    be pickled. No process is left, even after Ctrl-C.
    """
    check_numbers(tp_size=tp_size, pp_size=pp_size, threads=threads)
    for name, value in (("timeout_s", timeout_s), ("start_timeout_s", start_timeout_s)):
        if value is not None and not value > 0:
            raise UserError(f"got {name} = {value}, expected more than 0")
    name = getattr(function, "__name__", str(function))
    call = pickle_call(functools.partial(function, *args, **kwargs), name)
    size = 2 if tp_size is None and pp_size is None else (tp_size or 1) * (pp_size or 1)
    variables = environment(World(size), threads, pin, start_timeout_s=start_timeout_s)
    limit_to_meet_s = start_timeout(variables)
    ranks: list[RankProcess] = []
    with owned_folder(FOLDERS) as folder:
        (folder / CALL).write_bytes(pickle.dumps(sys.path) + call)
        try:
            for number in range(size):
                ranks.append(RankProcess(number, size, folder, variables, echo or _print))
            _wait(ranks, timeout_s, limit_to_meet_s)
            return [pickle.loads(rank.result.read_bytes()) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
            for rank in ranks:
                rank.close()


def _wait(ranks: Sequence[RankProcess], timeout_s: float | None, start_timeout_s: float) -> None:
    """Returns when every rank has left its result and has ended, or LINGER_S later."""
    began = looked = time.monotonic()
    stopped = StoppedRanks()
    while not all(rank.result.exists() for rank in ranks):
        for rank in ranks:
            rank.read()
        if _failures(ranks):
            first = _cause(ranks)
            ranks[first.rank].raise_error(first)
        if (now := time.monotonic()) - looked > LOOK_S:
            looked = now
            if (still := stopped.look({rank.rank: rank.process.pid for rank in ranks})) is not None:
                raise RankError(still, None, stands_still(ranks[still].process.pid), ranks[still].last_lines)
        waited = now - began
        if timeout_s is not None and waited > timeout_s:
            _raise_late(ranks, timeout_s)
        if waited > start_timeout_s and not all(rank.has_met for rank in ranks):
            _raise_not_met(ranks, start_timeout_s)
        time.sleep(POLL_S)
    settled = time.monotonic() + LINGER_S
    while any(rank.is_running for rank in ranks) and time.monotonic() < settled:
        time.sleep(POLL_S)


def _failures(ranks: Sequence[RankProcess]) -> list[RankFailure]:
    return [failure for rank in ranks if (failure := rank.failure())]


def _cause(ranks: Sequence[RankProcess]) -> RankFailure:
    """The first cause. Waits up to GRACE_S for it: the rank to which others lost the connection may not have ended."""
    deadline = time.monotonic() + GRACE_S
    while (first := to_blame(_failures(ranks))).lost_connection and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return first


def _raise_not_met(ranks: Sequence[RankProcess], start_timeout_s: float) -> None:
    """Raises RankError with the ranks that keep the others waiting: ranks that have not come to the meeting, else
    ranks that have not met the others.
    """
    missing = [rank for rank in ranks if not rank.is_waiting] or [rank for rank in ranks if not rank.has_met]
    _ask_where(missing)
    reason = not_met([rank.rank for rank in missing], start_timeout_s)
    raise RankError(missing[0].rank, None, reason, missing[0].last_lines)


def _raise_late(ranks: Sequence[RankProcess], timeout_s: float) -> None:
    late = [rank for rank in ranks if not rank.result.exists()]
    _ask_where(late)
    stacks = "\n".join(f"rank {rank.rank}:\n{rank.last_lines}" for rank in late)
    raise TimeoutError(f"the ranks were ended after {timeout_s:g} s, and these had not returned:\n{stacks}")


def _ask_where(ranks: Sequence[RankProcess]) -> None:
    """Has the ranks write their stacks into their last lines."""
    for rank in ranks:
        rank.say_where_it_stands()
    time.sleep(STACK_S)
    for rank in ranks:
        rank.read()


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
