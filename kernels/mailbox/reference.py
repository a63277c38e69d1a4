"""The same by torch.distributed: for ranks that share no memory, and where no compiler is."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .message import HEADER, LostRankError, Message, announced

MOST_UNDER_WAY = 4096  # messages


class GlooMailboxes:
    """See `SharedMailboxes`. What is sent is kept until it has gone, and so many bytes of it at most."""

    def __init__(self, group: dist.ProcessGroup | None, rank: int, names: Sequence[int], most_bytes: int) -> None:
        self._group, self._names, self._rank, self._most_bytes = group, names, rank, most_bytes
        self._to, self._from = names[(rank + 1) % len(names)], names[rank - 1]
        self._under_way: deque[tuple[Any, Tensor]] = deque()
        self._bytes = 0

    def send(self, message: Message) -> None:
        header = torch.frombuffer(bytearray(message.header), dtype=torch.uint8)
        for part in (header, message.payload):
            if part.numel():
                self._under_way.append((self._do(dist.isend, part, self._to), part))
                self._bytes += part.nbytes
        while self._bytes > self._most_bytes or len(self._under_way) > MOST_UNDER_WAY:
            self._finish_first()

    def receive(self) -> Message:
        header = torch.empty(HEADER.size, dtype=torch.uint8)
        self._do(dist.recv, header, self._from)
        message = announced(header.numpy().tobytes())
        if message.payload.numel():
            self._do(dist.recv, message.payload, self._from)
        return message

    def flush(self) -> None:
        """What is still under way when this object goes is lost."""
        while self._under_way:
            self._finish_first()

    def look(self, waited_s: float) -> None:
        """Nothing is seen of the other ranks from here: gloo says so itself when one of them has ended."""

    def _finish_first(self) -> None:
        work, part = self._under_way.popleft()
        self._bytes -= part.nbytes
        self._do(work.wait)

    def _do(self, action: Any, *arguments: Any) -> Any:
        try:
            return action(*arguments, group=self._group) if arguments else action()
        except RuntimeError as error:
            raise LostRankError(
                f"rank {self._names[self._rank]}: the messages between the ranks failed: {error}; all ranks of a model "
                "make the same calls, or none goes on"
            ) from error
