"""What the stages of a pipeline send each other: messages from each rank to the next one, and the last one's to the
first.

Ranks of one machine write and read in memory that they share; no system call is made. Others, and those without a
compiler, go through torch.distributed. Between GPUs rows go by NCCL.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.system.errors import RunError

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
GATHERED = -1  # the kind of what `gather` sends


class Ring:
    """This rank's end of a ring of one-way mailboxes. Messages arrive whole, and in the order in which they were sent.

    Every rank of `group` makes one at the same time. capacity: bytes that a rank may send before the next one receives
    any. transport: shared memory where all ranks can map it, unless "gloo" is asked for. gpu: where the rows lie, which
    then go from GPU to GPU; None: on the CPU. A rank that has ended or is stopped, and a wait of more than `timeout_s`,
    raise LostRankError with the rank's number, on all that wait. A rank that has left the call by an error raises
    RankFailedError there.
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
        """To the next rank; the payload is contiguous, and not changed before it has arrived."""
        self._ends.send(message)

    def receive(self) -> Message:
        """The next message of the rank before."""
        return self._ends.receive()

    def fail_call(self, reason: str) -> None:
        """This rank leaves the call by an error, so that the others do. It waits for nobody; what is under way nobody
        gets.
        """
        self._ends.fail_call(reason)

    def begin_call(self) -> None:
        """After a call that failed: returns when all have left it, and nothing of it is left in the mailboxes."""
        self._ends.begin_call()

    def await_computed(self) -> None:
        """Returns when the GPU has computed what it was told to; at once where there is none."""
        if isinstance(self._ends, DeviceMailboxes):
            self._ends.await_computed()

    def gather(self, x: Tensor) -> Tensor:
        """x, of one shape and type on all ranks: all of them call it. -> [ranks, the shape of x], by rank. Then all
        have what was sent to them before. Raises RunError where a rank sends something else.
        """
        parts = {self.rank: x.contiguous()}
        passing = parts[self.rank].view(torch.uint8).view(1, -1)
        for hop in range(1, self.size):
            self.send(Message(GATHERED, 0, hop, passing))
            message = self.receive()
            if message.kind != GATHERED or message.payload.nbytes != passing.nbytes:
                raise RunError(f"a rank has sent something else than all were to gather; {TOGETHER}")
            passing = message.payload
            parts[(self.rank - hop) % self.size] = passing.view(x.dtype).view(x.shape)
        self._ends.flush()  # what was sent reaches the next rank now, whatever becomes of this one
        return torch.stack([parts[rank] for rank in range(self.size)])
