"""Keys and values of all layers in a file. A pass over the layers has a few of them in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from labkit.engine.memory.stores import BackingStore
from labkit.kernels import build
from labkit.kernels.cache_stream import CacheFile, CachePass, CacheShape, CacheStream
from labkit.kernels.slot_stream import StreamSpan
from labkit.kernels.types import LayerCache, padded_head_dim
from labkit.models.config import ModelConfig


@dataclass(frozen=True)
class CacheFolder(BackingStore):
    """Folder for the files of offloaded caches of an engine on the CPU.

    weight_type: of the kernels that read and write them.
    """

    name = "disk"

    path: Path
    weight_type: str

    def zeros(self, config: ModelConfig, dtype: torch.dtype, batch: int, capacity: int) -> HeadsOnDisk:
        row = padded_head_dim(config.head_dim)
        shape = CacheShape.fitting(config.num_layers, batch, config.num_kv_heads, capacity, row, dtype)
        return HeadsOnDisk(self, self.on_all_ranks(lambda: CacheFile(self.path, shape)))


class HeadsOnDisk:
    """Like StoredHeads, but in a file: a layer is in memory from its turn in a pass until the next layer's turn.

    A change of the sequences or the capacity writes a new file. If that fails, the old file stays as it is.
    """

    def __init__(self, folder: CacheFolder, file: CacheFile, length: int = 0) -> None:
        """length: tokens of each sequence in the file."""
        self.folder, self._file, self._length = folder, file, length
        self._stream: CacheStream | None = None
        self._earlier: list[StreamSpan] = []  # of streams that have ended

    @property
    def capacity(self) -> int:
        return self._file.shape.capacity

    @property
    def batch(self) -> int:
        return self._file.shape.batch

    @property
    def stream(self) -> CacheStream:
        """Stream of layers between the file and memory. A new file has a new stream."""
        if self._stream is None:
            library = build.load(self.folder.weight_type)
            slots = min(self.folder.slots, self._file.shape.layers)
            self._stream = CacheStream(library, self._file, slots, self._length)
        return self._stream

    def layer(self, index: int, past: int, counter: Tensor | None = None) -> LayerCache:
        """Returns the view of a layer in the first slot. The other slots have the same layout."""
        return self.stream.layer(0, past)

    def begin_pass(self, written: range) -> CachePass:
        self._length = written.stop
        return self.stream.begin_pass(written)

    def layers_in_order(self, written: range) -> Iterator[LayerCache]:
        return self.begin_pass(written).layers_in_order(self._file.shape.layers)

    def copied(self) -> HeadsOnDisk:
        """Returns a copy in its own file."""
        return HeadsOnDisk(self.folder, self._copied(torch.arange(self.batch), self.capacity), self._length)

    def change(self, made_of: Callable[[Tensor], Tensor]) -> None:
        rows = made_of(torch.arange(self.batch))
        self._continue_with(self.folder.on_all_ranks(lambda: self._copied(rows, self.capacity)))

    def shrink(self, made_of: Callable[[Tensor], Tensor]) -> None:
        """Like `change`, to at most the present number of sequences, in the same file. A failure loses the file."""
        rows = made_of(torch.arange(self.batch))

        def shrunk() -> CacheFile:
            self._flush()
            if self._stream is not None:
                self._earlier += self._stream.take_spans()
                self._stream.close()  # it reads ahead
                self._stream = None
            return self._file.shrunk(rows, self._length)

        self._continue_with(self.folder.on_all_ranks(shrunk))

    def join(self, others: Sequence[HeadsOnDisk]) -> None:
        """Appends the sequences of the others. All have the same capacity and the same number of tokens."""
        parts = (self, *others)

        def joined() -> CacheFile:
            for part in parts:
                part._flush()
            rows = torch.arange(sum(part.batch for part in parts))
            return CacheFile.gathered([part._file for part in parts], rows, self.capacity, self._length)

        self._continue_with(self.folder.on_all_ranks(joined))

    def pass_bytes(self, sequences: int) -> int:
        """Returns the bytes that a pass reads for `sequences` sequences."""
        return self._file.shape.pass_bytes(sequences, self._length)

    def grow(self, capacity: int) -> None:
        rows = torch.arange(self.batch)
        self._continue_with(self.folder.on_all_ranks(lambda: self._copied(rows, capacity)))

    def take_spans(self) -> list[StreamSpan]:
        spans, self._earlier = self._earlier, []
        return spans + (self._stream.take_spans() if self._stream else [])

    def _copied(self, rows: Tensor, capacity: int) -> CacheFile:
        self._flush()
        return self._file.copied(rows, capacity, self._length)

    def _continue_with(self, file: CacheFile) -> None:
        self._file = file
        if self._stream is not None:
            self._earlier += self._stream.take_spans()
            self._stream = None  # the stream ends with its last reference

    def _flush(self) -> None:
        if self._stream is not None:
            self._stream.flush()
