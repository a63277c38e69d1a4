"""A rank group over gloo, for ranks that share no memory or have no compiler.

gloo can end a wait only by closing connections. So a rank group has connections of its own: a rank that leaves a call
by an error writes the reason to the store of the run and closes its connections, which ends the waits of the other
ranks. The next call makes new connections.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn
from uuid import uuid4

import torch.distributed as dist
from torch import Tensor

from .other_ranks import TOGETHER, LostRankError, RankFailedError

PAUSE_S = 0.002


class GlooGroup:
    """This rank's member of `group`. All ranks of the group create one at the same time, and connect on first use."""

    def __init__(self, group: dist.ProcessGroup | None, timeout_s: float = 600.0) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.names = dist.get_process_group_ranks(group)
        identities: list[Any] = [None] * self.size
        dist.all_gather_object(identities, uuid4().hex, group)
        store = dist.distributed_c10d._get_default_store()  # no public function gives the store of an existing group
        self._store, self._timeout_s = dist.PrefixStore(f"labkit/{identities[0]}", store), timeout_s
        self._connections: Any = None
        self._lost: str | None = None
        self.failed_calls = 0

    def send(self, part: Tensor, to: int) -> Any:
        """Sends to a rank of the group. Returns the work that `finish` waits for; the part is kept until then."""
        return self._do(lambda connections: connections.send([part], to, 0))

    def receive(self, part: Tensor, of: int) -> None:
        self._do(lambda connections: connections.recv([part], of, 0).wait())

    def finish(self, work: Any) -> None:
        self._do(lambda connections: work.wait())

    def all_gather(self, parts: Sequence[Tensor], mine: Tensor) -> None:
        """Fills `parts` with the part of each rank."""
        self._do(lambda connections: connections.allgather([list(parts)], [mine]).wait())

    def all_reduce(self, x: Tensor) -> None:
        """Replaces x by its sum over the ranks."""
        self._do(lambda connections: connections.allreduce([x]).wait())

    def fail_call(self, reason: str) -> None:
        """This rank leaves the call by an error, without waiting for other ranks."""
        with suppress(RuntimeError):  # the store may be lost
            self._store.set(self._key("failed", self.rank), reason)
        self.failed_calls += 1
        self._connections = None

    def begin_call(self) -> None:
        """Raises LostRankError if a rank was lost in an earlier call."""
        if self._lost is not None:
            raise LostRankError(self._lost)

    def _do(self, action: Callable[[Any], Any]) -> Any:
        try:
            if self._connections is None:
                self._connections = self._connect()
            return action(self._connections)
        except RuntimeError as error:
            if isinstance(error, RankFailedError | LostRankError):
                raise
            with suppress(dist.DistError):  # the store may be lost
                self.raise_failure()
            self._give_up(f"messages between the ranks failed: {error}")

    def look(self, waited_s: float) -> None:
        """Checks the other ranks during a wait that is not gloo's. Raises RankFailedError as `raise_failure` does, and
        LostRankError if the wait is longer than the limit, or if the store of the run is lost.
        """
        try:
            self.raise_failure()
        except dist.DistError as error:
            self._give_up(f"the store of the run is lost: {error}")
        if waited_s > self._timeout_s:
            self._give_up(f"nothing was received or sent within {self._timeout_s:.0f} s")

    def raise_failure(self) -> None:
        """Raises RankFailedError if another rank has left the call by an error."""
        for key in (self._key("failed", rank) for rank in range(self.size) if rank != self.rank):
            if self._store.check([key]):
                raise RankFailedError(self._store.get(key).decode())

    def _give_up(self, reason: str) -> NoReturn:
        self._lost = f"rank {self.names[self.rank]}: {reason}; {TOGETHER}"
        raise LostRankError(self._lost)

    def _connect(self) -> Any:
        """Connects to all other ranks, once they have come."""
        self._store.set(self._key("here", self.rank), "")
        begun, keys = time.monotonic(), [self._key("here", rank) for rank in range(self.size)]
        while not self._store.check(keys):
            self.raise_failure()
            if time.monotonic() - begun > self._timeout_s:
                missing = [name for name, key in zip(self.names, keys, strict=True) if not self._store.check([key])]
                raise RuntimeError(f"rank {missing[0]} did not come within {self._timeout_s:.0f} s")
            time.sleep(PAUSE_S)
        store = dist.PrefixStore(f"connections {self.failed_calls}", self._store)
        return dist.ProcessGroupGloo(store, self.rank, self.size, timedelta(seconds=self._timeout_s))

    def _key(self, state: str, rank: int) -> str:
        return f"call {self.failed_calls}/{state}/{rank}"
