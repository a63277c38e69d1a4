"""Messages between the stages of a pipeline: from each rank to the next, and from the last rank to the first.

Ranks of one machine write and read in shared memory, without system calls. Ranks without shared memory or without a
compiler use torch.distributed. Between GPUs rows go by NCCL.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.system.errors import RunError, UserError

from ..all_reduce.exchange import Transport
from ..gloo_group import GlooGroup
from ..other_ranks import TOGETHER, LostRankError, RankFailedError
from ..shared_memory import shared_memory
from .device import DeviceMailboxes, PairLinks
from .memory import SharedMailboxes, ring_bytes
from .message import Message
from .reference import GlooMailboxes

__all__ = ["LEAST_CAPACITY", "LostRankError", "Message", "RankFailedError", "Ring"]

LEAST_CAPACITY = 4 << 20  # bytes; a message may be longer
GATHERED = -1  # kind of the messages of `gather`


class Ring:
    """This rank's end of a ring of one-way mailboxes. Messages arrive whole, in the order in which they were sent.

    Every rank of `group` creates one at the same time.

    capacity: bytes that a rank may send before the next rank receives any.
    transport: shared memory if all ranks can map it, unless it is "gloo".
    gpu: the GPU of the rows, which then go from GPU to GPU; None: rows are on the CPU.

    All waiting ranks raise LostRankError with the rank's number if a rank has ended or is stopped, or if a wait is
    longer than `timeout_s`. They raise RankFailedError if a rank has left the call by an error.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        capacity: int = LEAST_CAPACITY,
        *,
        timeout_s: float = 600.0,
        transport: Transport | None = None,
        gpu: torch.device | None = None,
    ) -> None:
        if not isinstance(capacity, int) or capacity < 1:
            raise UserError(f"got capacity = {capacity!r}, expected a number of bytes of 1 or more")
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        names = dist.get_process_group_ranks(group)
        shared = None if transport == "gloo" else shared_memory(group, ring_bytes(self.size, capacity))
        self.transport: Transport = "gloo" if shared is None else "shared memory"
        self._ends: SharedMailboxes | GlooMailboxes | DeviceMailboxes
        if shared is None:
            self._ends = GlooMailboxes(GlooGroup(group, timeout_s), capacity)
        else:
            self._ends = SharedMailboxes(shared, self.rank, names, capacity, timeout_s)
        if gpu is not None:
            self._ends = DeviceMailboxes(self._ends, PairLinks(group, gpu), capacity)

    def send(self, message: Message) -> None:
        """Sends to the next rank. The payload must be contiguous, and must not change before it has arrived."""
        self._ends.send(message)

    def receive(self) -> Message:
        """The next message of the previous rank."""
        return self._ends.receive()

    def fail_call(self, reason: str) -> None:
        """This rank leaves the call by an error, without waiting. The other ranks then leave it too, and messages in
        flight are lost.
        """
        self._ends.fail_call(reason)

    def begin_call(self) -> None:
        """After a failed call: returns when all ranks have left it and the mailboxes are drained."""
        self._ends.begin_call()

    def await_computed(self) -> None:
        """Returns when the GPU has done all its work; at once without a GPU."""
        if isinstance(self._ends, DeviceMailboxes):
            self._ends.await_computed()

    def gather(self, x: Tensor) -> Tensor:
        """x, of one shape and type on all ranks -> [ranks, the shape of x], by rank. All ranks call it. Afterwards they
        have all earlier messages. Raises RunError if a rank sends something else.
        """
        parts = {self.rank: x.contiguous()}
        passing = parts[self.rank].view(torch.uint8).view(1, -1)
        for hop in range(1, self.size):
            self.send(Message(GATHERED, 0, hop, passing))
            message = self.receive()
            if message.kind != GATHERED or message.payload.nbytes != passing.nbytes:
                raise RunError(f"a rank sent another message while all ranks were to gather; {TOGETHER}")
            passing = message.payload
            parts[(self.rank - hop) % self.size] = passing.view(x.dtype).view(x.shape)
        self._ends.flush()  # the next rank now gets all messages, even if this rank ends
        return torch.stack([parts[rank] for rank in range(self.size)])
