"""Interfaces of a KV cache's storage: keys and values of all layers, and the backing store for offloaded ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from labkit.kernels.cache_stream import CachePass, PassedCaches
from labkit.kernels.other_ranks import UnexplainedError
from labkit.kernels.slot_stream import StreamSpan
from labkit.kernels.types import LayerCache
from labkit.models.config import ModelConfig

T = TypeVar("T")


class HeadStore(Protocol):
    """Keys and values of all layers, resident or offloaded. The methods with a body are for resident layers."""

    @property
    def capacity(self) -> int:
        """Tokens per sequence that fit."""

    @property
    def batch(self) -> int: ...

    @property
    def stream(self) -> PassedCaches | None:
        """Stream that brings layers from the backing store to the kernels and back. None: all layers are resident."""
        return None

    def layer(self, index: int, past: int, counter: Tensor | None = None) -> LayerCache:
        """Returns the kernels' view of one layer, which must be resident."""

    def begin_pass(self, written: range) -> CachePass | None:
        """Begins a pass over the layers that writes the tokens `written` of every sequence. Later tokens do not count.
        Returns None if all layers are resident.
        """
        return None

    def layers_in_order(self, written: range) -> Iterator[LayerCache]:
        """Yields one layer after the other, to read, or to write the tokens `written` of every sequence. Raises
        RunError if a layer can't be read.
        """

    def change(self, made_of: Callable[[Tensor], Tensor]) -> None:
        """Replaces the sequences by the ones that `made_of` selects. `made_of` takes a tensor with one entry per
        sequence.
        """

    def shrink(self, made_of: Callable[[Tensor], Tensor]) -> None:
        """Like `change`, to at most the present number of sequences, with little extra room. A failure may lose all
        sequences.
        """
        self.change(made_of)

    def join(self, others: Sequence[Any]) -> None:
        """Appends the sequences of other stores of the same kind, capacity and number of tokens."""

    def pass_bytes(self, sequences: int) -> int:
        """Returns the bytes that a pass brings to the kernels for `sequences` sequences; 0: all layers are resident."""
        return 0

    def grow(self, capacity: int) -> None:
        """Makes room for at least `capacity` tokens. A failure changes nothing."""

    def copied(self) -> HeadStore:
        """Returns a copy in its own memory."""

    def take_spans(self) -> list[StreamSpan]:
        """Returns the spans (what was done with a layer, and when) since the last call."""
        return []


@dataclass(frozen=True)
class BackingStore:
    """Backing store of an offloaded KV cache. `slots` layers at a time are in compute memory.

    name: of the backing store, for messages.
    any_failed: tells whether any rank of the model failed; all ranks call it together. None: there is one rank.
    """

    name: ClassVar[str]

    slots: int
    any_failed: Callable[[bool], bool] | None

    def zeros(self, config: ModelConfig, dtype: torch.dtype, batch: int, capacity: int) -> HeadStore:
        """Returns room for at least `capacity` tokens in each of `batch` sequences. If one rank has too little room,
        every rank raises an error: UserError there, UnexplainedError on the others.
        """
        raise NotImplementedError

    def on_all_ranks(self, make: Callable[[], T]) -> T:
        """Returns the result of `make`. If it fails on one rank, all ranks raise an error, so that none waits for that
        rank in a step: UnexplainedError on the others.
        """
        try:
            made = make()
        except BaseException:
            if self.any_failed is not None:
                self.any_failed(True)
            raise
        if self.any_failed is not None and self.any_failed(False):
            raise UnexplainedError("another rank has no room for its keys and values, and its message says why")
        return made
