"""What a KV cache asks of its keys and values, wherever they lie, and of a place for those that are elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from labkit.kernels.cache_stream import CachePass, PassedCaches
from labkit.kernels.slot_stream import StreamSpan
from labkit.kernels.types import LayerCache
from labkit.models.config import ModelConfig
from labkit.system.errors import RunError, UserError

T = TypeVar("T")


class HeadStore(Protocol):
    """Keys and values of all layers."""

    @property
    def capacity(self) -> int:
        """Tokens of each sequence that there is room for."""

    @property
    def batch(self) -> int: ...

    @property
    def stream(self) -> PassedCaches | None:
        """What the layers pass through between where they lie and where kernels use them; None where that is one."""

    def layer(self, index: int, past: int, counter: Tensor | None = None) -> LayerCache:
        """What the kernels take for one layer, if it is at hand."""

    def begin_pass(self, written: range) -> CachePass | None:
        """A pass over the layers, which writes the tokens `written` of every sequence; none behind them count. None
        where all layers are at hand.
        """

    def in_turn(self, written: range) -> Iterator[LayerCache]:
        """One layer after the other, to write the tokens `written` of every sequence, or to read. Raises RunError where
        one can't be read.
        """

    def change(self, made_of: Callable[[Tensor], Tensor]) -> None:
        """Goes on with the sequences that `made_of` makes of all, given a tensor with an entry for each."""

    def grow(self, capacity: int) -> None:
        """Makes room for at least `capacity` tokens; where that fails, everything is as it was."""

    def copied(self) -> HeadStore:
        """The same in memory of its own."""

    def take_spans(self) -> list[StreamSpan]:
        """What was done when with the layers since the last call."""


@dataclass(frozen=True)
class CachePlace:
    """Where keys and values lie of which `slots` layers at a time are where they are computed with.

    any_failed: whether this happened on any rank of the model, which all of them ask together; None: there are no
    others.
    """

    slots: int
    any_failed: Callable[[bool], bool] | None

    @property
    def name(self) -> str:
        """As messages call it."""
        raise NotImplementedError

    def zeros(self, config: ModelConfig, dtype: torch.dtype, batch: int, capacity: int) -> HeadStore:
        """Room for at least `capacity` tokens in each of `batch` sequences. Raises UserError where there is too little,
        on all ranks.
        """
        raise NotImplementedError

    def on_all_ranks(self, make: Callable[[], T]) -> T:
        """What `make` makes. Where one rank has no room, all of them get an error, and none waits for it in a step."""
        try:
            made = make()
        except (UserError, RunError):
            if self.any_failed is not None:
                self.any_failed(True)
            raise
        if self.any_failed is not None and self.any_failed(False):
            raise RunError("another rank has no room for its keys and values, and its message says why")
        return made
