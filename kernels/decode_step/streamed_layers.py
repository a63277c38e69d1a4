"""Layers that a step finds in the slots of a stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ..layer_stream import LayerStream
from ..layer_stream.device import DeviceStream
from ..slot_stream import awaited
from .weights import LayerWeights


@dataclass(frozen=True)
class StreamedLayers:
    """Layers that a step finds in the slots of a stream. The weights of a streamed layer point into the first slot."""

    stream: LayerStream | DeviceStream
    blocks: tuple[int, ...]  # block of each layer in the stream; -1: the layer is resident
    resident_bytes: int  # of all resident weights and of the slots

    @property
    def layers(self) -> tuple[int, ...]:
        """The streamed layers."""
        return tuple(layer for layer, block in enumerate(self.blocks) if block >= 0)

    @property
    def file(self) -> Path | None:
        """The file of the streamed layers; None if they come from the host's memory."""
        return self.stream.path

    @property
    def bytes_per_step(self) -> int:
        """Bytes that every step reads."""
        return sum(block.bytes for block in self.stream.blocks)

    def layer(self, weights: LayerWeights, turn: int) -> LayerWeights:
        """The layer with its matrices in the slot of a turn."""
        first, memory = self.stream.memory(0), self.stream.memory(turn)

        def moved(tensor: Tensor) -> Tensor:
            begin = tensor.data_ptr() - first.data_ptr()
            return memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

        return weights.with_matrices(moved)

    @contextmanager
    def resident(
        self, index: int, weights: LayerWeights, first_turn: int, waiting: AbstractContextManager[object]
    ) -> Iterator[LayerWeights]:
        """Layer `index` while it is needed, in a pass whose first block has `first_turn`: resident, or in a slot. The
        context `waiting` surrounds the wait for the slot.
        """
        if self.blocks[index] < 0:
            yield weights
            return
        turn = first_turn + self.blocks[index]
        with awaited(self.stream, turn, index, waiting):
            yield self.layer(weights, turn)
            self.stream.release(turn)
