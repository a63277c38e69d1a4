"""The ranks of a group over gloo: for those that share no memory, and where no compiler is.

gloo cannot end a wait but by closing connections. So the ranks have connections of their own for what they compute
together: a rank that leaves a call by an error says why in the store of the run and closes its own, which ends the
waits of the others. They are made anew for the next call.
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
    """This rank among those of `group`, each of which makes one at the same time. They connect on the first use."""

    def __init__(self, group: dist.ProcessGroup | None, timeout_s: float = 600.0) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.names = dist.get_process_group_ranks(group)
        made: list[Any] = [None] * self.size
        dist.all_gather_object(made, uuid4().hex, group)
        store = dist.distributed_c10d._get_default_store()  # the only way to that of a group that somebody else made
        self._store, self._timeout_s = dist.PrefixStore(f"labkit/{made[0]}", store), timeout_s
        self._connected: Any = None
        self._lost: str | None = None
        self.failed_calls = 0

    def send(self, part: Tensor, to: int) -> Any:
        """To a rank of the group; `finish` waits for what is returned. The part is kept until then."""
        return self._do(lambda connected: connected.send([part], to, 0))

    def receive(self, part: Tensor, of: int) -> None:
        self._do(lambda connected: connected.recv([part], of, 0).wait())

    def finish(self, work: Any) -> None:
        self._do(lambda connected: work.wait())

    def all_gather(self, parts: Sequence[Tensor], mine: Tensor) -> None:
        """Fills the parts with those of the ranks."""
        self._do(lambda connected: connected.allgather([list(parts)], [mine]).wait())

    def all_reduce(self, x: Tensor) -> None:
        """x becomes the sum over the ranks."""
        self._do(lambda connected: connected.allreduce([x]).wait())

    def fail_call(self, reason: str) -> None:
        """This rank leaves the call by an error. It waits for nobody."""
        with suppress(RuntimeError):  # the store may be lost
            self._store.set(self._key("failed", self.rank), reason)
        self.failed_calls += 1
        self._connected = None

    def begin_call(self) -> None:
        """Raises LostRankError where a rank was lost in a call before."""
        if self._lost is not None:
            raise LostRankError(self._lost)

    def _do(self, action: Callable[[Any], Any]) -> Any:
        try:
            if self._connected is None:
                self._connected = self._connect()
            return action(self._connected)
        except RuntimeError as error:
            if isinstance(error, RankFailedError | LostRankError):
                raise
            with suppress(dist.DistError):  # the store may be lost
                self.raise_failure()
            self._give_up(f"the messages between the ranks failed: {error}")

    def look(self, waited_s: float) -> None:
        """Called by a rank that has waited for so long for something that does not go by gloo. Raises RankFailedError
        as `raise_failure` does, and LostRankError where it has waited for too long, or the store of the run is lost.
        """
        try:
            self.raise_failure()
        except dist.DistError as error:
            self._give_up(f"the store of the run is lost: {error}")
        if waited_s > self._timeout_s:
            self._give_up(f"nothing came, or went, within {self._timeout_s:.0f} s")

    def raise_failure(self) -> None:
        """Raises RankFailedError where another rank has left the call by an error."""
        for key in (self._key("failed", rank) for rank in range(self.size) if rank != self.rank):
            if self._store.check([key]):
                raise RankFailedError(self._store.get(key).decode())

    def _give_up(self, why: str) -> NoReturn:
        self._lost = f"rank {self.names[self.rank]}: {why}; {TOGETHER}"
        raise LostRankError(self._lost)

    def _connect(self) -> Any:
        """Connections to all other ranks, once they are there."""
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

    def _key(self, what: str, rank: int) -> str:
        return f"call {self.failed_calls}/{what}/{rank}"
