"""The parent's end of a side. Starts a worker process for each rank, sends it requests, and ends it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import subprocess
import tempfile
from collections.abc import Collection
from time import monotonic
from types import TracebackType
from typing import Any, Self

from labkit.harness.compare.budget import MemoryBudget, memory_budget
from labkit.harness.compare.installation import INSTALLED, Installation
from labkit.system.child import LOOK_S
from labkit.system.errors import RunError, UserError
from labkit.system.lifetime import kill_session
from labkit.system.owned_folder import owned_folder

SECONDS_TO_END = 10
JOINING = ("prepare", "open_exchange")  # requests at which the ranks of a side meet


class WorkerError(RunError):
    """A side's process failed or died."""


class OutOfBudgetError(WorkerError):
    """A side does not fit into its memory limit."""


class SideProcess:
    """A fresh process for one side, with its thread count fixed before any library starts its pool.

    The worker ends with this context, and at once after an error. It has a session of its own, so Ctrl-C reaches only
    the parent. It ends by itself when the parent disappears.
    """

    def __init__(
        self, name: str, threads: int, cores: Collection[int] = (), installation: Installation = INSTALLED
    ) -> None:
        """`cores`: cores on which the worker may run; empty: all cores of this process. `installation`: the labkit that
        computes the side.
        """
        self.name = name
        self._errors = tempfile.TemporaryFile("a+")  # noqa: SIM115 - open as long as the process, which appends to it
        self._process = subprocess.Popen(
            installation.module("labkit.harness.compare.worker"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=installation.variables(OMP_NUM_THREADS=str(threads)),
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self.replies = self._process.stdin, self._process.stdout
        if cores:
            os.sched_setaffinity(self._process.pid, cores)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, op: str, **request: Any) -> dict[str, Any]:
        """The answer to one request. UserError where the worker refused the user's input, else WorkerError."""
        self.send(op, **request)
        return self.receive()

    def send(self, op: str, **request: Any) -> None:
        """Sends a request; `receive` waits for its answer."""
        try:
            self._requests.write(json.dumps({"op": op, **request}) + "\n")
            self._requests.flush()
        except BrokenPipeError:
            raise self._died() from None

    def receive(self) -> dict[str, Any]:
        """The answer to the last request; raises as `ask` does."""
        line = self.replies.readline()
        if not line:
            raise self._died()
        try:
            reply: dict[str, Any] = json.loads(line)
        except json.JSONDecodeError:
            raise WorkerError(f"{self.name} answered {line.strip()[:80]!r}, expected an object in JSON") from None
        if "error" in reply:
            self._end()
            message = f"{self.name}: {reply['message']}"
            if reply["error"] == OutOfBudgetError.__name__:
                raise OutOfBudgetError(message)
            if reply["users"]:
                raise UserError(message)
            raise WorkerError(f"{message} ({reply['error']})\n{self._last_errors()}")
        return reply

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None:
            self._kill()
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        self._end()
        self.replies.close()
        self._errors.close()

    def _end(self) -> None:
        """Waits for the end of the process, which ends by itself; kills it if it does not."""
        try:
            self._process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._kill()

    def _kill(self) -> None:
        if self._process.poll() is None:
            kill_session(self._process)

    def _died(self) -> WorkerError:
        code = self._process.wait()
        if code < 0:
            cause = f"was killed by {signal.Signals(-code).name}"
            if -code == signal.SIGKILL:
                cause += ", as the system does when memory runs out; use a smaller model, dtype or batch"
        else:
            cause = f"ended with exit code {code}"
        return WorkerError(f"the process of {self.name} {cause}\n{self._last_errors()}".rstrip())

    def _last_errors(self, lines: int = 12) -> str:
        self._errors.seek(0)
        return "\n".join(self._errors.read().splitlines()[-lines:])


class SideProcesses:
    """One side of a comparison: a `SideProcess` for each rank, each on its own cores if there are enough.

    A context. An error on one rank ends the whole side, because the other ranks would wait for it.
    """

    def __init__(self, name: str, threads: int, ranks: int = 1, installation: Installation = INSTALLED) -> None:
        self.name, self.ranks = name, ranks
        self._stack = contextlib.ExitStack()
        self._limits = self._stack.enter_context(contextlib.ExitStack())  # closed after the processes
        self._budget: MemoryBudget | None = None
        if ranks == 1:
            self._joins: list[dict[str, Any]] = [{}]
            self._processes = [self._stack.enter_context(SideProcess(name, threads, installation=installation))]
            return
        rendezvous = self._stack.enter_context(owned_folder("labkit-side-")) / "store"
        joins = [{"rank": rank, "ranks": ranks, "rendezvous": rendezvous.as_uri()} for rank in range(ranks)]
        self._joins = [{"join": join} for join in joins]
        self._processes = [
            self._stack.enter_context(SideProcess(f"{name}, rank {rank}", threads, cores, installation))
            for rank, cores in enumerate(cores_of_ranks(ranks, threads))
        ]

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes)

    @property
    def budget(self) -> MemoryBudget | None:
        """Memory limit of the processes; None: no limit."""
        return self._budget

    def limit_memory(self, gigabytes: float) -> None:
        """Limits the memory that all ranks together may take from now on, in GB (1e9 bytes)."""
        self._budget_gb = gigabytes
        self._budget = self._limits.enter_context(memory_budget(int(gigabytes * 1e9), self.pids))

    def ask(self, op: str, *, within_s: float = math.inf, **request: Any) -> list[dict[str, Any]]:
        """The answers of all ranks, by rank. Raises the first rank's error as `SideProcess.ask` does.

        OutOfBudgetError where a process was killed because it exceeded its memory. WorkerError where a rank has no
        answer after `within_s` seconds.
        """
        try:
            return self._answers(op, request, within_s)
        except OutOfBudgetError:
            raise
        except WorkerError:
            if self._budget is None or not self._budget.exceeded:
                raise
            raise OutOfBudgetError(
                f"{self.name} needs more than {self._budget_gb:g} GB of memory, the limit set by {self._budget.how}; "
                "give it more, or use a smaller model, dtype or batch"
            ) from None

    def _answers(self, op: str, request: dict[str, Any], within_s: float) -> list[dict[str, Any]]:
        for process, join in zip(self._processes, self._joins, strict=True):
            process.send(op, **request, **(join if op in JOINING else {}))
        answers: dict[int, dict[str, Any]] = {}
        last_moment = monotonic() + within_s
        with selectors.DefaultSelector() as waiting:
            for rank, process in enumerate(self._processes):
                waiting.register(process.replies, selectors.EVENT_READ, rank)
            while len(answers) < len(self._processes):
                for ready, _ in waiting.select(LOOK_S):
                    answers[ready.data] = self._processes[ready.data].receive()
                    waiting.unregister(ready.fileobj)
                if monotonic() > last_moment and len(answers) < len(self._processes):
                    silent = [process.name for rank, process in enumerate(self._processes) if rank not in answers]
                    raise WorkerError(
                        f"{' and '.join(silent)} did not answer within {within_s:.0f} s, many times what it took to "
                        "load: it hangs, or the machine is too busy; measure again on a quiet machine"
                    )
        return [answers[rank] for rank in range(len(self._processes))]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, at)


def cores_of_ranks(ranks: int, threads: int) -> list[list[int]]:
    """Neighbouring cores for the threads of each rank; empty lists where there are too few cores for all ranks."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < ranks * threads:
        return [[] for _ in range(ranks)]
    return [cores[rank * threads : (rank + 1) * threads] for rank in range(ranks)]
