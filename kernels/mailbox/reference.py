"""Mailboxes over gloo, for ranks that share no memory or have no compiler."""

from collections import deque
from typing import Any

import torch
from torch import Tensor

from ..gloo_group import GlooGroup
from .message import HEADER, Message, announced

MOST_UNDER_WAY = 4096  # messages


class GlooMailboxes:
    """See `SharedMailboxes`. Messages are kept until they are sent, `most_bytes` of them at most."""

    def __init__(self, group: GlooGroup, most_bytes: int) -> None:
        self._group, self._most_bytes = group, most_bytes
        self._to, self._from = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        self._under_way: deque[tuple[Any, Tensor]] = deque()
        self._bytes = 0

    def send(self, message: Message) -> None:
        header = torch.frombuffer(bytearray(message.header), dtype=torch.uint8)
        for part in (header, message.payload):
            if part.numel():
                self._under_way.append((self._group.send(part, self._to), part))
                self._bytes += part.nbytes
        while self._bytes > self._most_bytes or len(self._under_way) > MOST_UNDER_WAY:
            self._finish_first()

    def receive(self) -> Message:
        header = torch.empty(HEADER.size, dtype=torch.uint8)
        self._group.receive(header, self._from)
        message = announced(header.numpy().tobytes())
        if message.payload.numel():
            self._group.receive(message.payload, self._from)
        return message

    def flush(self) -> None:
        """Waits for all sends. Sends still in flight when this object is deleted are lost."""
        while self._under_way:
            self._finish_first()

    def fail_call(self, reason: str) -> None:
        """This rank leaves the call by an error. Its messages in flight are lost."""
        self._group.fail_call(reason)
        self._under_way.clear()
        self._bytes = 0

    def begin_call(self) -> None:
        self._group.begin_call()

    def look(self, waited_s: float) -> None:
        """Checks the other ranks during a wait of another kind: raises the errors of `receive`."""
        self._group.look(waited_s)

    def _finish_first(self) -> None:
        work, part = self._under_way.popleft()
        self._bytes -= part.nbytes
        self._group.finish(work)
