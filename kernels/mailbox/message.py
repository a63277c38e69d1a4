"""Messages from one rank to the next: a header of a few numbers, followed by a tensor."""

from struct import Struct
from typing import NamedTuple

import torch
from torch import Tensor

from labkit.system.errors import UserError

HEADER = Struct("7q")
DTYPES = (torch.float32, torch.int64, torch.uint8)


class Message(NamedTuple):
    """A message. Sender and receiver agree on the meaning of kind, micro_batch and step."""

    kind: int
    micro_batch: int
    step: int
    payload: Tensor  # [rows, width], float32, int64 or uint8
    sent_ns: int = 0  # begin of the send, the sender's perf_counter_ns: one clock for all processes of a machine

    @property
    def header(self) -> bytes:
        """Raises UserError for a payload that a mailbox would not send as it is."""
        payload = self.payload
        if payload.dim() != 2 or payload.dtype not in DTYPES or not payload.is_contiguous():
            contiguous = "" if payload.is_contiguous() else " that is not contiguous; use .contiguous()"
            raise UserError(
                f"payload: expected contiguous float32, int64 or uint8 [rows, width], got {payload.dtype} "
                f"{list(payload.shape)}{contiguous}"
            )
        rows, width = self.payload.shape
        dtype = DTYPES.index(self.payload.dtype)
        return HEADER.pack(self.kind, self.micro_batch, self.step, dtype, rows, width, self.sent_ns)


def announced(header: bytes) -> Message:
    """The message that a header announces, with room for its payload."""
    kind, micro_batch, step, dtype, rows, width, sent_ns = HEADER.unpack(header)
    return Message(kind, micro_batch, step, torch.empty(rows, width, dtype=DTYPES[dtype]), sent_ns)
