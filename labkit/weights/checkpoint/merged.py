"""The weights of a rank from the files of all ranks that saved them, with any number of ranks, layout and type.

The parts of each weight are taken from these files, and the numbers stay the same to the last bit. A matrix is divided
along its rows or along its columns. The second matrices of experts may be divided along both, because different ranks
may have different experts: they are merged expert by expert, along their columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from labkit.kernels.codes import cut_groups
from labkit.kernels.types import Linear, float_dtype
from labkit.models.config import CHOICE_BIAS, ModelConfig
from labkit.models.shards import Shard
from labkit.system.rounding import ceil_div
from labkit.weights.canonical import CanonicalLayers, Empty, RowBlocks, Weight, is_matrix
from labkit.weights.checkpoint.manifest import MatrixRecord
from labkit.weights.checkpoint.pieces import HeldRange, Interval, pieces, ranges_of
from labkit.weights.checkpoint.rank_files import RankFiles
from labkit.weights.checkpoint.shard_file import RowParts, ShardFile, key_of

GroupedScales = tuple[Tensor, int]  # [rows, groups, 1 or 2], and how many inputs share one
AT_ONCE = 4 << 20  # numbers that are unpacked at once, in memory besides the result


class MergedWeights(CanonicalLayers):
    """The weights of a rank from the files of all ranks, with any number of ranks, layout and type. Matrices are rows.

    Vectors are rounded to `dtype`, as they are when they come from the original checkpoint.
    """

    def __init__(self, saved: RankFiles, part: Shard, dtype: torch.dtype | None = None, floats: bool = False) -> None:
        super().__init__(part)
        self._saved, self._dtype, self._floats = saved, dtype, floats

    def load(self, name: str, index: int | None, empty: Empty) -> Weight:
        if not (self._floats and is_matrix(name)):
            return self.weight(name, index)
        if self._by_columns(name):
            return self._as_floats(self.weight(name, index))
        outputs, inputs = (self.part.top_shapes if index is None else self.part.layer_shapes)[name]
        return RowBlocks((outputs, inputs), lambda begin, end: self._as_floats(self.weight(name, index, (begin, end))))

    def _as_floats(self, weight: Tensor | Linear) -> Tensor:
        return (weight.floats() if isinstance(weight, Linear) else weight).to(self._dtype)

    def weight(self, name: str, index: int | None, rows: Interval | None = None) -> Tensor | Linear:
        """A tensor, or a quantised matrix with its scales. `rows`: only these rows, of a matrix not cut by columns."""
        key, shape = key_of(name, index), (self.part.top_shapes if index is None else self.part.layer_shapes)[name]
        if not is_matrix(name):
            parts = [
                self._saved.file(piece.holder).vector(key)[piece.begin : piece.end] for piece in self._row_pieces(name)
            ]
            vector = parts[0] if len(parts) == 1 else torch.cat(parts)
            return vector if name == CHOICE_BIAS else vector.to(self._dtype)
        if rows is not None:
            shape = (rows[1] - rows[0], shape[1])
        record = self._saved.file(0).record.matrices[key]
        out = torch.empty(shape, dtype=torch.int8 if record.group else float_dtype(self._saved.dtype))
        if self._by_columns(name):
            scales = self._merge_columns(out, name, key, record)
        else:
            scales = self._merge_rows(out, name, key, rows)
        if not record.group:
            return out
        merged, groups = zip(*scales, strict=True)
        return Linear(out, None, shape[0], shape[1], "rows", torch.cat(merged), groups[0], record.bits)

    def _by_columns(self, name: str) -> bool:
        """Whether the columns of a matrix are divided: among the present ranks, or among the saving ranks."""
        cut = self.part.cut(name) or self._saved.shards[0].cut(name)
        return cut is not None and cut.dim == 1

    def _merge_rows(self, out: Tensor, name: str, key: str, rows: Interval | None) -> list[GroupedScales]:
        """Fills `out` with the rows of this rank, or with some of these rows, and returns their scales."""
        row_pieces = self._row_pieces(name)
        if rows is not None:
            row_pieces = [inner for piece in row_pieces for inner in _within(piece, *rows)]
        scales = []
        for piece in row_pieces:
            stored, taken = self._stored(name, key, piece.holder), (piece.begin, piece.end)
            stored.copy_to(out[piece.at : piece.at + piece.end - piece.begin], taken, (0, out.shape[1]))
            if stored.group:
                scales.append((stored.scales(taken), stored.group))
        return scales

    def _row_pieces(self, name: str) -> list[HeldRange]:
        config = self._saved.config
        whole = (config.layer_shapes() | config.top_shapes())[name][0]
        return pieces(_rows_of(self.part, name, whole), [_rows_of(part, name, whole) for part in self._saved.shards])

    def _merge_columns(self, out: Tensor, name: str, key: str, record: MatrixRecord) -> list[GroupedScales]:
        """Fills `out` with the columns of this rank, and returns their scales. With experts, one after the other."""
        config = self._saved.config
        whole = (config.layer_shapes() | config.top_shapes())[name][1]
        cut, experts, scales = self.part.cut(name), _experts_of(self.part, name), []
        for expert, into in zip(experts, out.chunk(len(experts)), strict=True):
            rows = self._rows_of_expert(name, expert, len(into))
            holdings = [
                ranges_of(part.cut(name), whole) if holder in rows else ()
                for holder, part in enumerate(self._saved.shards)
            ]
            column_pieces = pieces(ranges_of(cut, whole), holdings)
            for piece in column_pieces:
                target = into.narrow(1, piece.at, piece.end - piece.begin)
                stored = self._stored(name, key, piece.holder)
                stored.copy_to(target, rows[piece.holder], (piece.begin, piece.end))
            if record.group:
                begin, end = cut.ranges[0] if cut else (0, whole)
                groups = ceil_div(whole, record.row_group)
                starts, group = cut_groups(begin, end, record.row_group, groups, record.bits)
                holders = {piece.holder for piece in column_pieces}
                held = {holder: self._stored(name, key, holder).scales(rows[holder]) for holder in holders}
                scales.append((self._scales_at(key, held, column_pieces, [start - begin for start in starts]), group))
        return scales

    def _rows_of_expert(self, name: str, expert: int, count: int) -> dict[int, Interval]:
        """The `count` rows of an expert's matrix in the file of each holder. A matrix of no expert has all rows."""
        rows = {}
        for holder, part in enumerate(self._saved.shards):
            if expert in (held := _experts_of(part, name)):
                first = (expert - held.start) * count
                rows[holder] = first, first + count
        return rows

    def _scales_at(self, key: str, held: dict[int, Tensor], parts: list[HeldRange], columns: list[int]) -> Tensor:
        """[rows, groups, 1 or 2]: for each column of this rank's part, the scales of the holder's group that contains
        it. held: the scales by holder.
        """
        found = []
        for column in columns:
            piece = next(piece for piece in parts if piece.at <= column < piece.at + piece.end - piece.begin)
            group = self._saved.file(piece.holder).record.matrices[key].group
            found.append(held[piece.holder][:, (piece.begin + column - piece.at) // group])
        return torch.stack(found, dim=1)

    def _stored(self, name: str, key: str, holder: int) -> StoredMatrix:
        config, part = self._saved.config, self._saved.shards[holder]
        firsts = {"ff1.weight": part.inner, "shared_ff1.weight": part.shared, "dense_ff1.weight": part.dense}
        interleaved, experts = 2 if config.gated and name in firsts else 1, len(_experts_of(part, name))
        parts = None
        if interleaved > 1 or experts > 1:
            parts = RowParts(len(firsts[name]) if name in firsts else config.hidden_size, interleaved, experts)
        return StoredMatrix(self._saved.file(holder), key, parts)


class StoredMatrix(NamedTuple):
    """The part of a matrix in the file of one rank. parts: of its rows; None: they are one."""

    file: ShardFile
    key: str
    parts: RowParts | None

    @property
    def group(self) -> int:
        """Number of inputs that share a scale; 0: the matrix is not quantised."""
        return self.file.record.matrices[self.key].group

    def copy_to(self, target: Tensor, rows: Interval, columns: Interval) -> None:
        """Copies these rows and columns, some rows at a time."""
        (begin, end), width = rows, columns[1] - columns[0]
        step = max(1, AT_ONCE // width)
        for first in range(begin, end, step):
            last = min(first + step, end)
            target[first - begin : last - begin].copy_(self.file.block(self.key, (first, last), columns, self.parts))

    def scales(self, rows: Interval) -> Tensor:
        """The scales of these rows, [rows, groups, 1 or 2]."""
        return self.file.scales(self.key, rows, self.parts)


def _is_stack(name: str, config: ModelConfig) -> bool:
    """Whether a weight is of all experts, one below the other."""
    return config.experts is not None and name.split(".")[0] in ("ff1", "ff2")


def _experts_of(part: Shard, name: str) -> range:
    """The experts that a rank has in a stack; 0 to 1 if the weight is no stack."""
    return part.experts if _is_stack(name, part.config) else range(1)


def _rows_of(part: Shard, name: str, whole: int) -> tuple[Interval, ...]:
    """The rows that a rank has of a weight of `whole` rows. A cut of a stack counts from the rank's first expert."""
    experts, all_experts = _experts_of(part, name), part.config.experts
    of_one = whole // all_experts.count if all_experts and _is_stack(name, part.config) else whole
    first, rows = experts.start * of_one, len(experts) * of_one
    return tuple((first + begin, first + end) for begin, end in ranges_of(part.cut(name), rows))


def _within(piece: HeldRange, begin: int, end: int) -> list[HeldRange]:
    """The part of a piece that goes to positions [begin, end) of the target; its `at` counts from `begin`."""
    first, last = max(begin, piece.at), min(end, piece.at + piece.end - piece.begin)
    if first >= last:
        return []
    return [HeldRange(piece.holder, piece.begin + first - piece.at, piece.begin + last - piece.at, first - begin)]
