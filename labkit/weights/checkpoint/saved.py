"""Reads labkit's own checkpoints for any number of ranks.

With the ranks and the layout of the save, a rank reads its own file unchanged. Otherwise its weights are merged from
the files of all ranks.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from labkit.kernels.types import Linear
from labkit.models.config import ModelConfig
from labkit.models.policy import Policy
from labkit.models.shards import Cut, Shard, cut_of, shard
from labkit.system.errors import UserError
from labkit.system.first_bytes import first_bytes, instead_of_content
from labkit.system.shown import shown_value
from labkit.weights.canonical import CanonicalLayers, Empty, is_matrix
from labkit.weights.checkpoint.manifest import MANIFEST, Manifest, described_model, read_manifest, stored_description
from labkit.weights.checkpoint.merged import MergedWeights
from labkit.weights.checkpoint.rank_files import RankFiles
from labkit.weights.checkpoint.shard_file import key_of
from labkit.weights.checkpoint.tensor_stream import AGAIN
from labkit.weights.listed_files import listed_path
from labkit.weights.spec import WeightSpec


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
    size, ep_size, experts = manifest.tp_size, manifest.ep_size, config.experts.count if config.experts else 1
    if size % ep_size or ep_size > experts:
        raise UserError(
            f"{folder / MANIFEST} has ep_size {ep_size} for tp_size {size} and {experts} experts; save the checkpoint "
            "again"
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


class SavedWeights(RankFiles):
    """A checkpoint of labkit's: canonical weights for an engine (`part`), or Hugging Face's tensors by name."""

    def __init__(self, folder: Path, manifest: Manifest, policy: Policy, config: ModelConfig) -> None:
        super().__init__(folder, manifest, config)
        self.policy, self.identity = policy, f"save {manifest.save}"

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

        Raises UserError for int8 weights if the spec has another type.
        """
        if self.dtype == torch.int8 and not spec.quantised:
            raise UserError(
                f"{self.folder} holds int8 weights, got dtype={spec.dtype}; pass dtype=torch.int8, or load the original"
            )
        if self.has_layout_of(spec):
            return OwnFileWeights(self, spec.part)
        return MergedWeights(self, spec.part, None if spec.quantised else spec.dtype)

    def has_layout_of(self, spec: WeightSpec) -> bool:
        """Whether each rank of the spec finds its weights in one file, as its kernels read them."""
        saved = (self.manifest.tp_size, self.manifest.ep_size, self.manifest.layout, self.dtype)
        return saved == (spec.part.size, spec.part.ep_size, spec.layout, spec.dtype)

    def floats(self, spec: WeightSpec) -> MergedWeights:
        """A rank's weights as floats of the spec's type; for int8 as float32, to be quantised anew."""
        return MergedWeights(self, spec.part, torch.float32 if spec.quantised else spec.dtype, floats=True)

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
