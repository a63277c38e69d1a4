"""Tokens that go through a layer together, and their mirror in C."""

import ctypes
from typing import NamedTuple

from torch import Tensor

from ..abi import CRows
from ..build import LONG, POINTER, fields, mirrors
from ..types import Rows, pointer


@mirrors("Chunk")
class CChunk(ctypes.Structure):
    _fields_ = fields(
        (CRows, "rows"),
        (LONG, "past"),
        (POINTER, "tokens"),
        (LONG, "keep"),
        (POINTER, "logits argmax hidden inputs outputs"),
        (LONG, "first_sequence"),
    )


class ChunkArgs(NamedTuple):
    """Tokens that go through a layer together: B sequences, T tokens of each, N = B * T. All tensors are contiguous.

    The step fills the given tensors among `logits`, `argmax`, `hidden` and `outputs`.
    """

    rows: Rows
    past: int  # keys and values are written from this slot of every cache on
    tokens: Tensor | None = None  # int64 [B, T], each in the vocabulary (the caller checks)
    keep: int = 0  # the last tokens of each sequence that logits, argmax and hidden are for
    logits: Tensor | None = None  # float32 [B*keep, V]
    argmax: Tensor | None = None  # int64 [B*keep]; -1: all logits are NaN
    hidden: Tensor | None = None  # float32 [B*keep, H], after the final norm
    inputs: Tensor | None = None  # float32 [N, H], instead of tokens for a range of layers without an embedding
    outputs: Tensor | None = None  # float32 [N, H], for a range without a head: all rows, after the final norm if any
    first_sequence: int = 0  # of the cache: the chunk has this one and the next B - 1

    @property
    def num_rows(self) -> int:
        """N: rows of all sequences."""
        return self.rows.batch * self.rows.tokens

    @property
    def c(self) -> CChunk:
        tensors = (self.logits, self.argmax, self.hidden, self.inputs, self.outputs)
        pointers = map(pointer, tensors)
        return CChunk(self.rows.c, self.past, pointer(self.tokens), self.keep, *pointers, self.first_sequence)
