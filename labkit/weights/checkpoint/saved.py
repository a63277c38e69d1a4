"""Reads labkit's own checkpoints for any number of ranks.

With the ranks and the layout of the save, a rank reads its own file unchanged. Otherwise the parts of each weight are
taken from the files of all ranks, and the numbers stay the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from labkit.kernels.codes import cut_groups
from labkit.kernels.types import Linear, float_dtype
from labkit.models.config import CHOICE_BIAS, ModelConfig
from labkit.models.policy import Policy
from labkit.models.shards import Cut, Shard, cut_of, shard
from labkit.system.errors import UnsupportedError, UserError
from labkit.system.first_bytes import first_bytes, instead_of_content
from labkit.system.rounding import ceil_div
from labkit.system.shown import shown_value
from labkit.weights.canonical import OF_EXPERTS, CanonicalLayers, Empty, RowBlocks, Weight, is_matrix
from labkit.weights.checkpoint.manifest import MANIFEST, Manifest, described_model, read_manifest, stored_description
from labkit.weights.checkpoint.pieces import HeldRange, Interval, pieces, ranges_of
from labkit.weights.checkpoint.shard_file import RowParts, ShardFile
from labkit.weights.checkpoint.tensor_stream import AGAIN
from labkit.weights.listed_files import listed_path
from labkit.weights.spec import WeightSpec

AT_ONCE = 4 << 20  # numbers that are unpacked at once, in memory besides the result


def saved_weights(folder: Path, policy: Policy, config: ModelConfig) -> SavedWeights | None:
    """The checkpoint that labkit saved in a folder, or None.

    Raises UserError, naming the file, for a checkpoint that is damaged, incomplete or of another model.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        if next(folder.glob("rank-*-of-*.safetensors"), None):
            raise UserError(f"{folder} has files of ranks but no {MANIFEST}: its save was interrupted; save it again")
        return None
    stored, model = stored_description(manifest), described_model(config)
    if different := [key for key in model if stored.get(key) != model[key]]:
        got = ", ".join(
            f"{key} = {shown_value(stored.get(key))}, expected {shown_value(model[key])}" for key in different[:3]
        )
        raise UserError(f"{folder / MANIFEST} is of another model than the config given with it: {got}")
    if len(manifest.files) != manifest.tp_size:
        raise UserError(
            f"{folder / MANIFEST} lists {len(manifest.files)} files for tp_size {manifest.tp_size}; "
            "save the checkpoint again"
        )
    for file in manifest.files:
        path = listed_path(folder, file.name, folder / MANIFEST)
        if not path.is_file():
            raise UserError(f"{path} is missing; {AGAIN}")
        if (size := path.stat().st_size) != file.bytes:
            if fault := instead_of_content(first_bytes(path, "a safetensors file")):
                raise UserError(f"{path} {fault}")
            raise UserError(f"{path} has {size} bytes, expected {file.bytes}; {AGAIN}")
    return SavedWeights(folder, manifest, policy, config)


class SavedWeights:
    """A checkpoint of labkit's: canonical weights for an engine (`part`), or Hugging Face's tensors by name."""

    def __init__(self, folder: Path, manifest: Manifest, policy: Policy, config: ModelConfig) -> None:
        self.folder, self.manifest, self.policy, self.config = folder, manifest, policy, config
        self.identity = f"save {manifest.save}"
        self._files: dict[int, ShardFile] = {}

    @property
    def dtype(self) -> torch.dtype:
        return self.manifest.torch_dtype

    @property
    def native(self) -> bool:
        """Whether the weights were codes before they were saved, so that no better precision exists."""
        return self.dtype == torch.int8 and self.manifest.quant is None

    def names(self) -> set[str]:
        return set(self._canonical)

    def get(self, name: str, dtype: torch.dtype | None = None, cut: Cut | None = None) -> Tensor:
        """The tensor as Hugging Face has it; int8 becomes float32. Reads the whole canonical weight that has it."""
        if name not in self._canonical:
            raise KeyError(f"no tensor {name!r} in this checkpoint; names() lists them")
        canonical, index = self._canonical[name]
        weight = MergedWeights(self, shard(self.config)).weight(canonical, index)
        whole = weight.floats() if isinstance(weight, Linear) else weight
        tensor = cut_of(name, self.policy.stored(self.config, canonical, whole, index)[name], cut)
        return tensor if dtype is None else tensor.to(dtype, copy=True)

    def part(self, spec: WeightSpec) -> OwnFileWeights | MergedWeights:
        """A rank's weights: in the saved layout if the spec's kernels read that layout, else as rows.

        Raises UserError for int8 weights if the spec has another type, and for experts that cannot be divided.
        """
        self._require_whole_experts(spec.part)
        if self.dtype == torch.int8 and not spec.quantised:
            raise UserError(
                f"{self.folder} holds int8 weights, got dtype={spec.dtype}; pass dtype=torch.int8, or load the original"
            )
        if self.has_layout_of(spec):
            return OwnFileWeights(self, spec.part)
        return MergedWeights(self, spec.part, None if spec.quantised else spec.dtype)

    def has_layout_of(self, spec: WeightSpec) -> bool:
        """Whether each rank of the spec finds its weights in one file, as its kernels read them."""
        saved = (self.manifest.tp_size, self.manifest.layout, self.dtype)
        return saved == (spec.part.size, spec.layout, spec.dtype)

    def floats(self, spec: WeightSpec) -> MergedWeights:
        """A rank's weights as floats of the spec's type; for int8 as float32, to be quantised anew.

        Raises UserError for experts that cannot be divided.
        """
        self._require_whole_experts(spec.part)
        return MergedWeights(self, spec.part, torch.float32 if spec.quantised else spec.dtype, floats=True)

    def _require_whole_experts(self, part: Shard) -> None:
        """Raises UserError for a rank with some of the experts, unless it has them whole, and so has the file."""
        experts = part.config.experts
        if experts is None or len(part.experts) == experts.count:
            return
        if self.manifest.tp_size > 1:
            raise UnsupportedError(
                f"{self.folder} was saved by {self.manifest.tp_size} ranks, and its experts cannot be divided among "
                "ranks; leave moe out, or save the checkpoint with one process"
            )
        if len(part.inner) < part.config.intermediate_size:
            raise UnsupportedError(
                f"the experts of {self.folder} cannot be divided and cut as well; use as many parts of experts as "
                f"ranks, ep_size={part.size}"
            )

    def check(self) -> None:
        """Reads every tensor. Raises UserError for a tensor that was altered since it was written."""
        for rank in range(self.manifest.tp_size):
            self.file(rank).check()

    def check_headers(self) -> None:
        """Raises UserError where the header of a file contradicts the manifest. No weight is read."""
        for rank in range(self.manifest.tp_size):
            self.file(rank).check_header(self.dtype)

    def file(self, rank: int) -> ShardFile:
        if rank not in self._files:
            record = self.manifest.files[rank]
            self._files[rank] = ShardFile(self.folder, record, self.manifest.save)
        return self._files[rank]

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """The parts of the model that the saving ranks held."""
        return tuple(shard(self.config, self.manifest.tp_size, rank) for rank in range(self.manifest.tp_size))

    @cached_property
    def _canonical(self) -> dict[str, tuple[str, int | None]]:
        """Hugging Face's name -> canonical name and layer."""
        config, policy = self.config, self.policy
        places: list[tuple[str, int | None]] = [(name, None) for name in config.top_shapes()]
        places += [(name, index) for index in range(config.num_layers) for name in config.layer_shapes(index)]
        return {stored: place for place in places for stored in policy.stored_names(*place)}


class OwnFileWeights(CanonicalLayers):
    """The weights of a rank from its own file, read straight into the engine's memory."""

    def __init__(self, saved: SavedWeights, part: Shard) -> None:
        super().__init__(part)
        self._file = saved.file(part.rank)

    def load(self, name: str, index: int | None, empty: Empty) -> Tensor | Linear:
        key = key_of(name, index)
        return self._file.linear(key, empty) if is_matrix(name) else self._file.vector(key)


class StreamedWeights(OwnFileWeights):
    """As `OwnFileWeights`, but the matrices of the layers in `slots` are views of their slots, which are filled later.

    slots: by layer, a slot, uint8 [bytes], and the offset in the file of the slot's first byte.
    only: canonical names of the matrices that are views; None: all.
    """

    def __init__(
        self,
        saved: SavedWeights,
        part: Shard,
        slots: Mapping[int, tuple[Tensor, int]],
        only: Container[str] | None = None,
    ) -> None:
        super().__init__(saved, part)
        self._slots, self._only = slots, only

    def load(self, name: str, index: int | None, empty: Empty) -> Tensor | Linear:
        is_view = is_matrix(name) and (self._only is None or name in self._only)
        if index is not None and index in self._slots and is_view:
            return self._file.linear_within(key_of(name, index), *self._slots[index])
        return super().load(name, index, empty)


class MergedWeights(CanonicalLayers):
    """The weights of a rank from the files of all ranks, with any number of ranks, layout and type. Matrices are rows.

    Vectors are rounded to `dtype`, as they are when they come from the original checkpoint.
    """

    def __init__(
        self, saved: SavedWeights, part: Shard, dtype: torch.dtype | None = None, floats: bool = False
    ) -> None:
        super().__init__(part)
        self._saved, self._dtype, self._floats = saved, dtype, floats

    def load(self, name: str, index: int | None, empty: Empty) -> Weight:
        if not (self._floats and is_matrix(name)):
            return self.weight(name, index)
        if self._dim(name) == 1:
            return self._as_floats(self.weight(name, index))
        outputs, inputs = (self.part.top_shapes if index is None else self.part.layer_shapes)[name]
        return RowBlocks((outputs, inputs), lambda begin, end: self._as_floats(self.weight(name, index, (begin, end))))

    def _as_floats(self, weight: Tensor | Linear) -> Tensor:
        return (weight.floats() if isinstance(weight, Linear) else weight).to(self._dtype)

    def weight(self, name: str, index: int | None, rows: Interval | None = None) -> Tensor | Linear:
        """A tensor, or a quantised matrix with its scales. `rows`: only these rows, of a matrix not cut by columns."""
        shapes = self.part.top_shapes if index is None else self.part.layer_shapes
        key, shape = key_of(name, index), shapes[name]
        if not is_matrix(name):
            parts = [
                self._saved.file(piece.holder).vector(key)[piece.begin : piece.end] for piece in self._pieces(name, 0)
            ]
            vector = parts[0] if len(parts) == 1 else torch.cat(parts)
            return vector if name == CHOICE_BIAS else vector.to(self._dtype)
        dim = self._dim(name)
        weight_pieces = self._pieces(name, dim)
        if rows is not None:
            weight_pieces = [inner for piece in weight_pieces for inner in _within(piece, *rows)]
            shape = (rows[1] - rows[0], shape[1])
        record = self._saved.file(0).record.matrices[key]
        out = torch.empty(shape, dtype=torch.int8 if record.group else float_dtype(self._saved.dtype))
        for piece in weight_pieces:
            self._fill(out, key, name, dim, piece)
        if not record.group:
            return out
        scales, group = self._scales(key, name, dim, weight_pieces, shape)
        return Linear(out, None, shape[0], shape[1], "rows", scales, group, record.bits)

    def _dim(self, name: str) -> int:
        """The dimension along which the weight is divided: among the present ranks, or among the saving ranks."""
        return next((cut.dim for cut in (self._cut(name), self._saved.shards[0].cut(name)) if cut), 0)

    def _cut(self, name: str) -> Cut | None:
        """This rank's part of the whole weight."""
        part, experts = self.part, self.part.config.experts
        if experts is None or len(part.experts) == experts.count or name.split(".")[0] not in ("ff1", "ff2"):
            return part.cut(name)
        rows = part.config.layer_shapes()[name][0]
        of_one = rows // experts.count
        return Cut(0, ((part.experts.start * of_one, part.experts.stop * of_one),), rows)

    def _pieces(self, name: str, dim: int) -> list[HeldRange]:
        config = self._saved.config
        whole = (config.layer_shapes() | config.top_shapes())[name][dim]
        holdings = [ranges_of(part.cut(name), whole) for part in self._saved.shards]
        return pieces(ranges_of(self._cut(name), whole), holdings)

    def _fill(self, out: Tensor, key: str, name: str, dim: int, piece: HeldRange) -> None:
        """Copies a piece of the matrix to its place in `out`, some rows at a time."""
        file, parts = self._saved.file(piece.holder), self._parts(name, piece.holder)
        taken, (outputs, inputs) = (piece.begin, piece.end), out.shape
        (begin, end), columns = (taken, (0, inputs)) if dim == 0 else ((0, outputs), taken)
        target = out.narrow(dim, piece.at, piece.end - piece.begin)
        step = max(1, AT_ONCE // (columns[1] - columns[0]))
        for first in range(begin, end, step):
            last = min(first + step, end)
            target[first - begin : last - begin].copy_(file.block(key, (first, last), columns, parts))

    def _scales(
        self, key: str, name: str, dim: int, parts: list[HeldRange], shape: tuple[int, ...]
    ) -> tuple[Tensor, int]:
        """The scales of the parts, by rows or by groups of columns, and how many inputs share one."""
        files = {piece.holder: self._saved.file(piece.holder) for piece in parts}
        if dim == 0:
            rows = [
                files[piece.holder].scales(key, (piece.begin, piece.end), self._parts(name, piece.holder))
                for piece in parts
            ]
            return torch.cat(rows), next(iter(files.values())).record.matrices[key].group
        cut = self.part.cut(name)
        whole = cut.whole if cut else shape[1]
        begin, end = cut.ranges[0] if cut else (0, whole)
        record = self._saved.file(0).record.matrices[key]
        groups = ceil_div(whole, record.row_group)
        starts, size = cut_groups(begin, end, record.row_group, groups, record.bits)
        scales = {holder: file.scales(key, (0, shape[0]), self._parts(name, holder)) for holder, file in files.items()}
        columns = [
            self._group(key, scales, piece, start - begin) for start in starts for piece in _at(parts, start - begin)
        ]
        return torch.stack(columns, dim=1), size

    def _group(self, key: str, scales: dict[int, Tensor], piece: HeldRange, column: int) -> Tensor:
        """The scales of the holder's group that contains a column of this rank's part. `scales`: by holder."""
        group = self._saved.file(piece.holder).record.matrices[key].group
        return scales[piece.holder][:, (piece.begin + column - piece.at) // group]

    def _parts(self, name: str, holder: int) -> RowParts | None:
        """The parts of a holder's rows; None: they are one."""
        config, shard = self._saved.config, self._saved.shards[holder]
        firsts = {"ff1.weight": shard.inner, "shared_ff1.weight": shard.shared, "dense_ff1.weight": shard.dense}
        interleaved = 2 if config.gated and name in firsts else 1
        experts = config.experts.count if config.experts and name in OF_EXPERTS else 1
        if interleaved == experts == 1:
            return None
        return RowParts(len(firsts[name]) if name in firsts else config.hidden_size, interleaved, experts)


def key_of(name: str, index: int | None) -> str:
    """The name of a canonical weight in a file. `index`: its layer; None outside them."""
    return name if index is None else f"layers.{index}.{name}"


def _at(parts: list[HeldRange], column: int) -> list[HeldRange]:
    """The pieces that contain this column of the target: one at most."""
    return [piece for piece in parts if piece.at <= column < piece.at + piece.end - piece.begin]


def _within(piece: HeldRange, begin: int, end: int) -> list[HeldRange]:
    """The part of a piece that goes to positions [begin, end) of the target; its `at` counts from `begin`."""
    first, last = max(begin, piece.at), min(end, piece.at + piece.end - piece.begin)
    if first >= last:
        return []
    return [HeldRange(piece.holder, piece.begin + first - piece.at, piece.begin + last - piece.at, first - begin)]
