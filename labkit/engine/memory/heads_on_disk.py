"""Keys and values of all layers in a file, of which a pass over the layers has a few in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from labkit.kernels import build
from labkit.kernels.cache_stream import CacheFile, CachePass, CacheShape, CacheStream
from labkit.kernels.slot_stream import StreamSpan
from labkit.kernels.types import LayerCache, padded_head_dim
from labkit.models.config import ModelConfig
from labkit.system.errors import RunError, UserError


@dataclass(frozen=True)
class CacheFolder:
    """Where the caches of an engine have their files, and how many layers of each are in memory at a time.

    weight_type: of the kernels that read and write them. any_failed: whether this happened on any rank of the model,
    which all of them ask together; None: there are no others.
    """

    path: Path
    slots: int
    weight_type: str
    any_failed: Callable[[bool], bool] | None = None

    def zeros(
        self, config: ModelConfig, dtype: torch.dtype, batch: int, capacity: int, device: torch.device
    ) -> HeadsOnDisk:
        """Room for at least `capacity` tokens in each of `batch` sequences, beside the CPU. Raises UserError where the
        disk has too little.
        """
        assert device.type == "cpu"
        row = padded_head_dim(config.head_dim)
        shape = CacheShape.fitting(config.num_layers, batch, config.num_kv_heads, capacity, row, dtype)
        return HeadsOnDisk(self, self.on_all_ranks(lambda: CacheFile(self.path, shape)))

    def on_all_ranks(self, make: Callable[[], CacheFile]) -> CacheFile:
        """What `make` makes. Where one rank has no room, all of them get an error, and none waits for it in a step."""
        made, reason = None, None
        try:
            made = make()
        except (UserError, RunError) as error:
            reason = error
        failed = self.any_failed is not None and self.any_failed(made is None)
        if reason is not None:
            raise reason
        if failed or made is None:
            raise RunError("another rank has no room for its keys and values, and its message says why")
        return made


class HeadsOnDisk:
    """As StoredHeads, but in a file: a layer is in memory from its turn in a pass until the next one's.

    Where the sequences or their room change, a new file takes the place of the old one, which stays as it is if that
    fails.
    """

    def __init__(self, folder: CacheFolder, file: CacheFile, held: int = 0) -> None:
        """held: tokens of each sequence that are in the file."""
        self.folder, self._file, self._held = folder, file, held
        self._stream: CacheStream | None = None
        self._earlier: list[StreamSpan] = []

    @property
    def capacity(self) -> int:
        return self._file.shape.capacity

    @property
    def batch(self) -> int:
        return self._file.shape.batch

    @property
    def stream(self) -> CacheStream:
        """What the layers pass through; another one once the file is."""
        if self._stream is None:
            library = build.load(self.folder.weight_type)
            self._stream = CacheStream(library, self._file, self.folder.slots, self._held)
        return self._stream

    def layer(self, index: int, past: int, counter: Tensor | None = None) -> LayerCache:
        """Where the first slot has a layer, and every other slot at the same distance from its beginning."""
        return self.stream.layer(0, past)

    def begin_pass(self, written: range) -> CachePass:
        """A pass over the layers, which writes the tokens `written` of every sequence; none behind them count."""
        self._held = written.stop
        return self.stream.begin_pass(written)

    def in_turn(self, written: range) -> Iterator[LayerCache]:
        """The layers one after the other, each until the next is asked for. Raises RunError where one can't be read."""
        turns = self.begin_pass(written)
        for index in range(self._file.shape.layers):
            turns.wait(index)
            self.stream.check()
            yield turns.layer(index)
            turns.release(index)

    def first(self, batch: int) -> HeadsOnDisk:
        """All sequences in the same file, for a copy to begin with."""
        assert batch == self.batch
        self._flush()
        return HeadsOnDisk(self.folder, self._file, self._held)

    def change(self, made_of: Callable[[Tensor], Tensor]) -> None:
        """Goes on with the sequences that `made_of` makes of all, given one number of each."""
        self._go_on_with(self._copied(made_of(torch.arange(self.batch)), self.capacity))

    def grow(self, capacity: int) -> None:
        """Makes room for at least `capacity` slots."""
        rows = torch.arange(self.batch)
        self._go_on_with(self.folder.on_all_ranks(lambda: self._copied(rows, capacity)))

    def take_spans(self) -> list[StreamSpan]:
        """What was done when with the layers since the last call."""
        spans, self._earlier = self._earlier, []
        return spans + (self._stream.take_spans() if self._stream else [])

    def _copied(self, rows: Tensor, capacity: int) -> CacheFile:
        self._flush()
        return self._file.copied(rows, capacity, self._held)

    def _go_on_with(self, file: CacheFile) -> None:
        self._file = file
        if self._stream is not None:
            self._earlier += self._stream.take_spans()
            self._stream = None  # it ends with whoever still looks at it

    def _flush(self) -> None:
        if self._stream is not None:
            self._stream.flush()
