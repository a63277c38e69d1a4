"""What goes from one rank to the next: a few numbers of fixed form, and behind them a tensor."""

from struct import Struct
from typing import NamedTuple

import torch
from torch import Tensor

HEADER = Struct("7q")
DTYPES = (torch.float32, torch.int64, torch.uint8)


class Message(NamedTuple):
    """kind, micro_batch, step: whatever sender and receiver agree on. payload: [rows, width], float32, int64 or uint8.

    sent_ns: when it began to be sent, perf_counter_ns of the sender: one clock for all processes of a machine.
    """

    kind: int
    micro_batch: int
    step: int
    payload: Tensor
    sent_ns: int = 0

    @property
    def header(self) -> bytes:
        rows, width = self.payload.shape
        dtype = DTYPES.index(self.payload.dtype)
        return HEADER.pack(self.kind, self.micro_batch, self.step, dtype, rows, width, self.sent_ns)


def announced(header: bytes) -> Message:
    """The message that a header announces, with room for its payload."""
    kind, micro_batch, step, dtype, rows, width, sent_ns = HEADER.unpack(header)
    return Message(kind, micro_batch, step, torch.empty(rows, width, dtype=DTYPES[dtype]), sent_ns)
