"""Mailboxes between ranks whose rows are on GPUs: the rows go from GPU to GPU by NCCL and never touch the host.

Everything else goes through the mailboxes of the host, as it does without GPUs: the kind of a message, the size of its
rows, and the few numbers that the host knows anyway (chosen tokens, last messages). A rank gives rows to NCCL first,
and then announces them. The receiver waits at its mailbox for any message, and requests rows from NCCL only once they
have been sent. This has three effects:

- No wait is endless. NCCL works in order for a pair of ranks, and a send ends when it is received. Receives have the
  order of the sends, because they follow the announcements. Each direction has its own communicator. With one for both
  directions, two ranks that send to each other before they receive would wait for each other, and so would all stages
  of a full ring.
- A stage takes any message that is ready: the order of messages need not be known in advance.
- An idle pipeline has no transfers in flight, which NCCL's watchdog would end after some minutes.

The host waits by polling. Meanwhile it checks that the other ranks still run and are in the same call, because a GPU
that waits for an ended rank waits for ever.

NCCL can't cancel a send, and it would meet the first receive of the next call. So after a failed call the ranks tell
each other what they have sent, and each rank drains the rows that it has not requested yet. Until then the sends of the
failed call stay in flight.

None of this has run on GPUs yet: the tests use gloo, and a simulated NCCL, instead.
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
from .memory import SharedMailboxes
from .message import Message
from .reference import GlooMailboxes

ON_DEVICE = 1 << 20  # is added to the kind of a message whose rows come by NCCL
SENT = -2  # kind of the messages after a failed call that say what was sent
MOST_UNDER_WAY = 4096  # messages
MOST_LEFT = 2 * MOST_UNDER_WAY  # messages drained after a failed call: NCCL may end a send before its receive
WATCHDOG = timedelta(days=14)  # NCCL ends a process whose sends are not received; all waits in labkit have a limit

Passed = Callable[[], bool]  # whether an event has happened; once true, later work on the device comes after the event


class Links(Protocol):
    """Moves rows between this device and the devices of two other ranks."""

    device: torch.device

    def send(self, rows: Tensor) -> Passed:
        """Sends to the next rank, which has the rows once the result has passed. Until then they must not change."""

    def receive(self, rows: Tensor) -> Passed:
        """Receives from the previous rank. Once the result has passed, the rows are filled."""

    def computed(self) -> Passed:
        """An event that has passed once the device has done its work so far."""


class DeviceMailboxes:
    """See `SharedMailboxes`. Rows are kept until they arrive; while they are more than `most_bytes`, senders wait."""

    def __init__(self, host: SharedMailboxes | GlooMailboxes, links: Links, most_bytes: int) -> None:
        self._host, self._links, self._most_bytes = host, links, most_bytes
        self._under_way: deque[tuple[Passed, Tensor]] = deque()
        self._bytes = 0
        self._awaited: deque[tuple[Passed, Tensor]] = deque()  # more than one only after a failed call
        self._sent = self._requested = 0  # messages with rows, since the beginning
        self._sizes: deque[int] = deque(maxlen=MOST_LEFT)  # sizes, in numbers, of the latest sent rows
        self._failed = False

    def send(self, message: Message) -> None:
        rows = message.payload
        if not rows.is_floating_point() or rows.device != self._links.device or rows.numel() == 0:
            self._host.send(message._replace(payload=rows.cpu()))
            return
        self._sent += 1
        self._sizes.append(rows.numel())
        self._under_way.append((self._links.send(rows), rows))
        self._bytes += rows.nbytes
        self._host.send(message._replace(kind=message.kind + ON_DEVICE, payload=torch.tensor([rows.shape])))
        while self._is_full or (self._under_way and self._under_way[0][0]()):
            self._finish_first()

    def receive(self) -> Message:
        message = self._host.receive()
        if message.kind < ON_DEVICE:
            return message
        rows = self._request(*message.payload[0].tolist())
        self._await_requested()
        return message._replace(kind=message.kind - ON_DEVICE, payload=rows)

    def flush(self) -> None:
        self._host.flush()
        while self._under_way:
            self._finish_first()

    def fail_call(self, reason: str) -> None:
        """This rank leaves the call by an error. Its sends stay in flight until the next call begins."""
        self._host.fail_call(reason)
        self._failed = True

    def begin_call(self) -> None:
        self._host.begin_call()
        if self._failed:
            self._drain()
            self._failed = False

    def await_computed(self) -> None:
        """Returns when the device has done all its work. Raises the errors of the device."""
        self._await(self._links.computed())

    def _drain(self) -> None:
        """Drains both directions. All ranks do this together, after all have left the call."""
        self._host.send(Message(SENT, 0, 0, torch.tensor([[self._sent, *self._sizes]])))
        sent, *sizes = self._host.receive().payload[0].tolist()
        left = sent - self._requested
        assert 0 <= left <= len(sizes)
        for size in sizes[len(sizes) - left :]:
            self._request(size)
        self._await_requested()
        self.flush()

    def _request(self, *shape: int) -> Tensor:
        rows = torch.empty(shape, dtype=torch.float32, device=self._links.device)
        self._awaited.append((self._links.receive(rows), rows))
        self._requested += 1
        return rows

    def _await_requested(self) -> None:
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
                self._host.look(now - begun)
                looked = now


class PairLinks:
    """Links by NCCL: each direction between two ranks of a ring is a group of these two. All ranks of the run create
    their links at the same time; `group` is the ring of this rank. The groups stay until the process group of the run
    ends: ranks finish with an engine at different times, and NCCL ends a communicator on both ranks at once.
    """

    backend = "nccl"

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.device, self._me = device, dist.get_rank()
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, (self._gpu(), tuple(dist.get_process_group_ranks(group))))
        refuse_shared_gpus([gpu for gpu, _ in gathered])
        for ring in sorted({ring for _, ring in gathered}):
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
        """The identity of this GPU among the GPUs of all machines."""
        return socket.gethostname(), str(torch.cuda.get_device_properties(self.device).uuid)

    def _connect(self, sender: int, receiver: int) -> None:
        """Sends a first number, with which NCCL connects the two ranks. All ranks create all groups, pair by pair in
        the same order, so that no two ranks wait for each other.
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
            self._tried(work.wait)  # later work of the device comes after it; the host does not wait
            return True

        return passed

    def _tried(self, action: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return action(*arguments)
        except RuntimeError as error:
            raise LostRankError(f"rank {self._me}: sending or receiving rows failed: {error}; {TOGETHER}") from error


def refuse_shared_gpus(gpus: Sequence[object]) -> None:
    """Raises UserError if two ranks compute on one GPU, which NCCL does not support. gpus: the GPU of each rank."""
    for rank, gpu in enumerate(gpus):
        if (first := gpus.index(gpu)) != rank:
            raise UserError(
                f"ranks {first} and {rank} compute on the same GPU; each rank of a pipeline needs its own: call "
                "torch.cuda.set_device(local_rank) before init_process_group, or leave both to labkit"
            )
