"""The file of one rank, with matrices as kernels read them. Rows and columns of a packed matrix can be unpacked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from labkit.kernels.codes import DEPTH, PACKED, WORD, unpack_scales
from labkit.kernels.gemm import LANES, packed_shape, unpack, unpack_words
from labkit.kernels.gpu import CPU
from labkit.kernels.memory import Heap
from labkit.kernels.types import Linear, float_dtype
from labkit.system.errors import UserError
from labkit.system.rounding import BLOCK, ceil_div, round_up
from labkit.weights.canonical import Empty
from labkit.weights.checkpoint.manifest import FileRecord, MatrixRecord
from labkit.weights.checkpoint.pieces import Interval
from labkit.weights.checkpoint.tensor_stream import AGAIN, TensorStream
from labkit.weights.checkpoint.tensor_writer import PAGE


def key_of(name: str, index: int | None) -> str:
    """The name of a canonical weight in a file. `index`: its layer; None outside them."""
    return name if index is None else f"layers.{index}.{name}"


def scales_of(key: str) -> str:
    """The key of a matrix's scales."""
    return f"{key.removesuffix('.weight')}.scales"


@dataclass(frozen=True)
class RowParts:
    """The rows of a matrix: `rows` of each part. The gate and the up projection of an MLP are two parts, which are
    interleaved in blocks. With several experts each has parts of its own, whose packed rows end with a whole block.
    """

    rows: int
    interleaved: int = 1
    experts: int = 1


class ShardFile:
    """One rank's file, read whole or in parts. Raises UserError, naming it, if it is damaged or of another save."""

    def __init__(self, folder: Path, record: FileRecord, save: str) -> None:
        self.record, self.path = record, folder / record.name
        self._stream = TensorStream(self.path, record.digests)
        if (own := self._stream.metadata.get("save")) != save:
            raise UserError(
                f"{self.path} is of save {own}, but the manifest of {save}; keep the files of each save together"
            )
        if different := self._stream.tensors.keys() ^ record.digests.keys():
            raise UserError(f"{self.path} and the manifest have different tensors, {min(different)} for one; {AGAIN}")

    def check(self) -> None:
        """Raises UserError unless every tensor still has its digest."""
        for name in self._stream.tensors:
            self._stream.check(name)

    def check_header(self, dtype: torch.dtype) -> None:
        """Raises UserError if the header contradicts the manifest. No weight is read. dtype: of the save."""
        stored = self._stream.tensors
        types = dict.fromkeys(stored, torch.float32)
        for key in self.record.matrices:
            matrix = self._matrix(key)
            codes = torch.int8 if matrix.layout == "words" else PACKED[matrix.bits]
            types[key] = codes if matrix.group else float_dtype(dtype)
            types |= {scales_of(key): torch.float16} if matrix.group else {}
        for key, kind in types.items():
            if stored[key].dtype != kind:
                raise UserError(f"{key} of {self.path} is {stored[key].dtype}, expected {kind}; {AGAIN}")
        for layer in self.record.layers:
            entries = [entry for name, entry in stored.items() if name.startswith(f"layers.{layer.layer}.")]
            begin = min((entry.offset for entry in entries), default=0)
            end = max((entry.offset + entry.nbytes for entry in entries), default=0)
            if (layer.offset, layer.bytes) != (begin, round_up(end - begin, PAGE)):
                raise UserError(
                    f"layer {layer.layer} of {self.path} is from {begin} to {end}, but the manifest says "
                    f"{layer.bytes} bytes from {layer.offset} on; {AGAIN}"
                )

    def place(self, key: str) -> tuple[int, int] | None:
        """The offset and the bytes of a tensor; None: the file has none of this name."""
        stored = self._stream.tensors.get(key)
        return None if stored is None else (stored.offset, stored.nbytes)

    def vector(self, key: str) -> Tensor:
        """A vector, in float32."""
        self._require(key)
        return self._stream.whole(key)

    def linear(self, key: str, empty: Empty) -> Linear:
        """A matrix as the file holds it. A packed matrix is read into memory from `empty`."""
        empty = Heap(CPU).empty if self._matrix(key).layout == "rows" else empty

        def read(name: str) -> Tensor:
            stored = self._stream.tensors[name]
            return self._stream.read_into(name, empty(stored.shape, stored.dtype))

        return self._linear(key, read)

    def linear_within(self, key: str, memory: Tensor, offset: int) -> Linear:
        """A matrix whose tensors are views of `memory`, uint8: the file's bytes from `offset` on, now or later."""

        def within(name: str) -> Tensor:
            stored = self._stream.tensors[name]
            begin = stored.offset - offset
            return memory[begin : begin + stored.nbytes].view(stored.dtype).view(stored.shape)

        return self._linear(key, within)

    def _linear(self, key: str, tensor: Callable[[str], Tensor]) -> Linear:
        matrix = self._matrix(key)
        scales = tensor(scales_of(key)) if matrix.group else None
        return Linear(
            tensor(key), None, matrix.outputs, matrix.inputs, matrix.layout, scales, matrix.group, matrix.bits
        )

    def block(self, key: str, rows: Interval, columns: Interval, parts: RowParts | None) -> Tensor:
        """These rows and columns of a matrix. parts: None: it has one."""
        matrix = self._matrix(key)
        first, last = columns
        if matrix.layout == "rows":
            return self._stream.slab(key, rows, columns)
        if matrix.layout == "words":
            return unpack_words(self._stream.slab(key, rows), matrix.inputs, matrix.bits)[:, first:last]
        lanes = DEPTH[matrix.bits] if matrix.group else LANES.get(self._stream.tensors[key].dtype, 1)
        within = (first // lanes, ceil_div(last, lanes))
        skipped = first - within[0] * lanes
        return self._unpacked(key, rows, within, parts)[:, skipped : skipped + last - first]

    def scales(self, key: str, rows: Interval, parts: RowParts | None) -> Tensor:
        """The scales of these rows, [rows, groups, 1 or 2]; `matrices[key].group` inputs make a group."""
        if self._matrix(key).layout == "panels":
            return self._unpacked(scales_of(key), rows, None, parts, unpack_scales)
        return self._stream.slab(scales_of(key), rows)

    def _unpacked(
        self,
        key: str,
        rows: Interval,
        within: Interval | None,
        parts: RowParts | None,
        unpack: Callable[[Tensor], Tensor] = unpack,
    ) -> Tensor:
        parts = parts or RowParts(rows[1])
        width = BLOCK // parts.interleaved  # consecutive rows in a block; a gated block has gate, then up
        taken = []
        for part in range(parts.interleaved * parts.experts):
            start, expert = part * parts.rows, part // parts.interleaved
            begin, end = max(0, rows[0] - start), min(rows[1] - start, parts.rows)
            if begin < end:
                first = expert * ceil_div(parts.rows, width)
                blocks = (first + begin // width, first + ceil_div(end, width))
                lanes = unpack(self._stream.slab(key, blocks, within)).unflatten(0, (-1, parts.interleaved, width))
                skipped = begin % width
                taken.append(lanes[:, part % parts.interleaved].flatten(0, 1)[skipped : skipped + end - begin])
        return taken[0] if len(taken) == 1 else torch.cat(taken)

    def _matrix(self, key: str) -> MatrixRecord:
        self._require(key)
        if key not in self.record.matrices:
            raise UserError(f"the manifest lists no matrix {key} in {self.path}; {AGAIN}")
        matrix = self.record.matrices[key]
        stored = self._stream.tensors[key]
        shapes = {
            "rows": (matrix.outputs, matrix.inputs),
            "panels": packed_shape(matrix.outputs, matrix.inputs, stored.dtype),
            "words": (matrix.outputs, ceil_div(matrix.inputs, WORD[matrix.bits]), 4),
        }
        if shapes.get(matrix.layout) != stored.shape:
            raise UserError(
                f"{key} of {self.path} has shape {list(stored.shape)}, which is not the shape of "
                f"[{matrix.outputs}, {matrix.inputs}] as {matrix.layout}; {AGAIN}"
            )
        if matrix.group:
            self._require(scales_of(key))
        return matrix

    def _require(self, key: str) -> None:
        if key not in self._stream.tensors:
            raise UserError(f"{self.path} lacks {key}; {AGAIN}")
