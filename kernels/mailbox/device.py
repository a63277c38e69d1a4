"""Mailboxes between ranks whose rows lie on GPUs: the rows go from GPU to GPU by NCCL and never touch the host.

Everything else goes through the mailboxes of the host as it does without GPUs: what a message is, how long its rows
are, and the few numbers that the host knows anyway (tokens that have been chosen, last words). Rows are given to NCCL
first, and then announced. So a rank waits at the mailbox for whatever comes, and asks NCCL for rows only once they have
been sent. Then

- nothing waits for ever. NCCL does what it is given for two ranks in order, and a send ends when it is received.
  Receives are asked for in the order of the sends, because they follow what was said. Each direction has a communicator
  of its own; with one for both, two ranks that send to each other before they receive would wait for each other, and so
  would all stages of a full ring.
- a stage takes whatever is ready: which messages come in which order need not be known ahead.
- an idle pipeline has nothing under way, which NCCL's watchdog would end after some minutes.

The host waits by asking again and again. Meanwhile it looks whether the other ranks still live and are in the same
call, since a GPU that waits for one that has ended waits for ever.

NCCL can't take a send back, which would meet the first receive of the next call. So after a call that failed the ranks
say what they have sent, and each asks for what it has not asked for yet. Until then the sends of the failed call are
under way.

None of this has run on GPUs yet: the tests have gloo, and a played NCCL, in its place.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import monotonic
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.system.errors import UserError

from ..other_ranks import LOOK_S, TOGETHER, LostRankError
from .message import Message

ON_DEVICE = 1 << 20  # is added to the kind of a message whose rows come by another way
SENT = -2  # the kind of what ranks say to each other after a call that failed
MOST_UNDER_WAY = 4096  # messages
MOST_LEFT = 2 * MOST_UNDER_WAY  # that are asked for after a call that failed: NCCL may end a send ahead of its receive
WATCHDOG = timedelta(days=14)  # NCCL ends a process whose sends nobody takes; whoever waits here has a limit

Passed = Callable[[], bool]  # whether something has happened; once it has, later work on the device comes behind it


class Told(Protocol):
    """The mailboxes of the host."""

    def send(self, message: Message) -> None: ...

    def receive(self) -> Message: ...

    def flush(self) -> None: ...

    def look(self, waited_s: float) -> None: ...

    def fail_call(self, reason: str) -> None: ...

    def begin_call(self) -> None: ...


class Links(Protocol):
    """What moves rows between this device and those of two other ranks."""

    device: torch.device

    def send(self, rows: Tensor) -> Passed:
        """Once it has passed, the next rank has the rows, which are not changed before."""

    def receive(self, rows: Tensor) -> Passed:
        """Once it has passed, the rows of the rank before are there."""

    def computed(self) -> Passed:
        """Once it has passed, the device has computed what it was told to so far."""


class DeviceMailboxes:
    """See `SharedMailboxes`. What is sent is kept until it has arrived, and so many bytes of it at most."""

    def __init__(self, told: Told, links: Links, most_bytes: int) -> None:
        self._told, self._links, self._most_bytes = told, links, most_bytes
        self._under_way: deque[tuple[Passed, Tensor]] = deque()
        self._bytes = 0
        self._awaited: deque[tuple[Passed, Tensor]] = deque()  # more than one only after a call that failed
        self._sent = self._asked_for = 0  # messages with rows, since the beginning
        self._sizes: deque[int] = deque(maxlen=MOST_LEFT)  # numbers in each of those sent last
        self._failed = False

    def send(self, message: Message) -> None:
        rows = message.payload
        if not rows.is_floating_point() or rows.device != self._links.device or rows.numel() == 0:
            self._told.send(message._replace(payload=rows.cpu()))
            return
        self._sent += 1
        self._sizes.append(rows.numel())
        self._under_way.append((self._links.send(rows), rows))
        self._bytes += rows.nbytes
        self._told.send(message._replace(kind=message.kind + ON_DEVICE, payload=torch.tensor([rows.shape])))
        while self._is_full or (self._under_way and self._under_way[0][0]()):
            self._finish_first()

    def receive(self) -> Message:
        message = self._told.receive()
        if message.kind < ON_DEVICE:
            return message
        rows = self._ask_for(*message.payload[0].tolist())
        self._await_asked()
        return message._replace(kind=message.kind - ON_DEVICE, payload=rows)

    def flush(self) -> None:
        self._told.flush()
        while self._under_way:
            self._finish_first()

    def fail_call(self, reason: str) -> None:
        """What is under way stays so until the next call begins."""
        self._told.fail_call(reason)
        self._failed = True

    def begin_call(self) -> None:
        self._told.begin_call()
        if self._failed:
            self._empty()
            self._failed = False

    def await_computed(self) -> None:
        """Returns when the device has computed what it was told to. Raises what went wrong there."""
        self._await(self._links.computed())

    def _empty(self) -> None:
        """Nothing is under way, in either direction; all ranks have left the call, and all do this."""
        self._told.send(Message(SENT, 0, 0, torch.tensor([[self._sent, *self._sizes]])))
        sent, *sizes = self._told.receive().payload[0].tolist()
        left = sent - self._asked_for
        assert 0 <= left <= len(sizes)
        for size in sizes[len(sizes) - left :]:
            self._ask_for(size)
        self._await_asked()
        self.flush()

    def _ask_for(self, *shape: int) -> Tensor:
        rows = torch.empty(shape, dtype=torch.float32, device=self._links.device)
        self._awaited.append((self._links.receive(rows), rows))
        self._asked_for += 1
        return rows

    def _await_asked(self) -> None:
        while self._awaited:
            self._await(self._awaited[0][0])
            self._awaited.popleft()

    @property
    def _is_full(self) -> bool:
        return self._bytes > self._most_bytes or len(self._under_way) > MOST_UNDER_WAY

    def _finish_first(self) -> None:
        passed, rows = self._under_way[0]
        self._await(passed)
        self._under_way.popleft()
        self._bytes -= rows.nbytes

    def _await(self, passed: Passed) -> None:
        begun = looked = monotonic()
        while not passed():
            if (now := monotonic()) - looked > LOOK_S:
                self._told.look(now - begun)
                looked = now


class PairLinks:
    """Links by NCCL: each direction of a ring is a group of its two ranks. All ranks of the run make theirs at the same
    time, each of them its ring's, which `group` is. The groups stay until the process group of the run ends: ranks are
    done with an engine at different times, and NCCL ends a communicator on both of its ranks at once.
    """

    backend = "nccl"

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.device, self._me = device, dist.get_rank()
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (self._gpu(), tuple(dist.get_process_group_ranks(group))))
        refuse_shared_gpus([gpu for gpu, _ in everyone])
        for ring in sorted({ring for _, ring in everyone}):
            for sender, receiver in zip(ring, (*ring[1:], ring[0]), strict=True):
                self._connect(sender, receiver)

    def send(self, rows: Tensor) -> Passed:
        return self._passed(self._tried(dist.isend, rows, *self._to))

    def receive(self, rows: Tensor) -> Passed:
        return self._passed(self._tried(dist.irecv, rows, *self._from))

    def computed(self) -> Passed:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event.query

    def _gpu(self) -> object:
        """Which one it is, of all machines."""
        return socket.gethostname(), str(torch.cuda.get_device_properties(self.device).uuid)

    def _connect(self, sender: int, receiver: int) -> None:
        """A first number goes through, with which NCCL connects the two. Pair by pair in one order on all ranks, which
        make all groups, so that none waits for one that waits.
        """
        pair = dist.new_group([sender, receiver], timeout=WATCHDOG, backend=self.backend)
        number = torch.zeros(1, device=self.device)
        if self._me == sender:
            self._to = receiver, pair
            passed = self.send(number)
        elif self._me == receiver:
            self._from = sender, pair
            passed = self.receive(number)
        else:
            return
        while not passed():
            pass

    def _passed(self, work: dist.Work) -> Passed:
        def passed() -> bool:
            if not work.is_completed():
                return False
            self._tried(work.wait)  # so that what the device does next comes behind it; the host does not wait
            return True

        return passed

    def _tried(self, action: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return action(*arguments)
        except RuntimeError as error:
            raise LostRankError(f"rank {self._me}: the rows between the ranks failed: {error}; {TOGETHER}") from error


def refuse_shared_gpus(gpus: Sequence[object]) -> None:
    """Raises UserError where two ranks compute on one GPU, between which NCCL does not go. gpus: of each rank."""
    for rank, gpu in enumerate(gpus):
        if (first := gpus.index(gpu)) != rank:
            raise UserError(
                f"ranks {first} and {rank} compute on the same GPU; each rank of a pipeline needs its own: call "
                "torch.cuda.set_device(local_rank) before init_process_group, or leave both to labkit"
            )
