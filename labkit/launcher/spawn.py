"""A function as the ranks of tensor parallelism: one call from a notebook or a script, the results by rank.

Every rank is a fresh Python process that ends with the call. What goes wrong in one ends them all: no other rank can
finish without it, and most would wait in a collective for ever.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from labkit.launcher.command import INTERFACE
from labkit.launcher.failure import RankFailure, how_it_ended, to_blame
from labkit.launcher.rendezvous import loopback
from labkit.launcher.shares import PIN, threads_each
from labkit.system.appended_lines import AppendedLines
from labkit.system.errors import RunError, UserError
from labkit.system.lifetime import kill_session
from labkit.system.pickled_call import pickle_call

POLL_S = 0.05
GRACE_S = 1.0  # for the cause of a lost connection to show
LINGER_S = 5.0  # for a rank to end once its result is there
STACK_S = 0.5  # for a rank to write where it stands
TAIL_LINES = 20
CALL, RESULT, ERROR = "call.pickle", "rank-{}.result", "rank-{}.error"


class RankError(RunError):
    """A rank raised, or its process ended. Of several ranks, it is the first cause.

    rank; error_type: the name of the exception's class, None where the process ended without one; reason: the
    exception's message, or how the process ended; rank_traceback: of the rank, or the last lines that it printed.
    """

    def __init__(self, rank: int, error_type: str | None, reason: str, rank_traceback: str) -> None:
        said = f"{error_type}: {reason}" if error_type else reason
        super().__init__(f"rank {rank}: {said}" + (f"\n\n{rank_traceback}" if rank_traceback else ""))
        self.rank, self.error_type, self.reason, self.rank_traceback = rank, error_type, reason, rank_traceback


def launch(
    function: Callable[..., Any],
    /,
    *args: Any,
    tp_size: int = 2,
    threads: int | None = None,
    timeout_s: float | None = None,
    pin: bool = True,
    echo: Callable[[str], None] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Call `function(*args, **kwargs)` in `tp_size` new processes at once, and return what each returned, by rank.

    In each torch.distributed is initialised before the call, with NCCL where there is a GPU for every rank. Functions
    of notebook cells and lambdas work; arguments and results are pickled, tensors exactly. threads: of each rank; by
    default OMP_NUM_THREADS, else its share of the processors, to which it keeps unless `pin` is False. echo: is given
    each line that a rank prints, after "[rank 0] "; by default they go to sys.stdout. Arguments of `function` with the
    names of these go in by functools.partial.

    Raises RankError for the rank that failed first; TimeoutError after `timeout_s`, with where each rank stood then;
    ValueError for sizes that cannot be, and for what cannot be pickled. Whatever happens, Ctrl-C too, no process is
    left.
    """
    for name, value in (("tp_size", tp_size), ("threads", threads), ("timeout_s", timeout_s)):
        if value is not None and not value > 0:
            raise UserError(f"got {name} = {value}, expected more than 0")
    name = getattr(function, "__name__", str(function))
    call = pickle_call(functools.partial(function, *args, **kwargs), name)
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", str(threads_each(tp_size)))
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    if not pin:
        environment[PIN] = "0"
    if interface := loopback():
        environment.setdefault(INTERFACE, interface)
    ranks: list[_Rank] = []
    with tempfile.TemporaryDirectory(prefix="labkit-launch-") as temporary:
        folder = Path(temporary)
        (folder / CALL).write_bytes(pickle.dumps(sys.path) + call)
        try:
            for rank in range(tp_size):
                ranks.append(_Rank(rank, tp_size, folder, environment, echo or _print))
            _wait(ranks, timeout_s)
            return [pickle.loads(rank.result.read_bytes()) for rank in ranks]
        finally:
            for each in ranks:
                kill_session(each.process)
            for each in ranks:
                each.close()


class _Rank:
    """One process: what it prints, and what it leaves."""

    def __init__(
        self, rank: int, ranks: int, folder: Path, environment: dict[str, str], echo: Callable[[str], None]
    ) -> None:
        self.rank = rank
        self.result, self.error = (folder / name.format(rank) for name in (RESULT, ERROR))
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  by close()
        self._lines = AppendedLines(self._output.fileno(), lambda line: echo(f"[rank {rank}] {line}"))
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-u", "-m", "labkit.launcher.rank", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env=environment | {name: str(value) for name, value in place.items()},
            start_new_session=True,  # Ctrl-C reaches the caller alone
        )

    @property
    def last_lines(self) -> str:
        return "\n".join(self._lines.lines[-TAIL_LINES:])

    def read(self) -> None:
        self._lines.read()

    def failure(self) -> RankFailure | None:
        exit_code = self.process.poll()  # before the files are looked for, which are there when it ends
        if self.error.exists():
            error = json.loads(self.error.read_text())
            return RankFailure(self.rank, None, f"{error['type']}: {error['message']}", error["at"])
        if exit_code is None or self.result.exists():
            return None
        return RankFailure(self.rank, exit_code, "", time.monotonic())

    def raise_error(self, failure: RankFailure) -> None:
        if failure.exit_code is None:
            error = json.loads(self.error.read_text())
            raise RankError(self.rank, error["type"], error["message"], error["traceback"])
        self._lines.read(last=True)
        reason = f"its process ended before the function returned, {how_it_ended(failure.exit_code)}"
        raise RankError(self.rank, None, reason, self.last_lines)

    def say_where_it_stands(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGUSR1)

    def close(self) -> None:
        self._lines.read(last=True)
        self._output.close()


def _wait(ranks: Sequence[_Rank], timeout_s: float | None) -> None:
    """Returns when every rank has left its result and, given the time, ended."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while not all(rank.result.exists() for rank in ranks):
        for rank in ranks:
            rank.read()
        if _failures(ranks):
            first = _cause(ranks)
            ranks[first.rank].raise_error(first)
        if deadline is not None and time.monotonic() > deadline:
            assert timeout_s is not None
            _raise_late(ranks, timeout_s)
        time.sleep(POLL_S)
    settled = time.monotonic() + LINGER_S
    while any(rank.process.poll() is None for rank in ranks) and time.monotonic() < settled:
        time.sleep(POLL_S)


def _failures(ranks: Sequence[_Rank]) -> list[RankFailure]:
    return [failure for rank in ranks if (failure := rank.failure())]


def _cause(ranks: Sequence[_Rank]) -> RankFailure:
    """A rank that others lost the connection to may not have ended yet."""
    deadline = time.monotonic() + GRACE_S
    while (first := to_blame(_failures(ranks))).lost_connection and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return first


def _raise_late(ranks: Sequence[_Rank], timeout_s: float) -> None:
    late = [rank for rank in ranks if not rank.result.exists()]
    for rank in late:
        rank.say_where_it_stands()
    time.sleep(STACK_S)
    for rank in late:
        rank.read()
    stood = "\n".join(f"rank {rank.rank}:\n{rank.last_lines}" for rank in late)
    raise TimeoutError(f"the ranks were ended after {timeout_s:g} s, and these had not returned:\n{stood}")


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
