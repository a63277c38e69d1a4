"""The files of the ranks that saved a checkpoint of labkit's own."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import torch

from labkit.models.config import ModelConfig
from labkit.models.shards import Shard, shard
from labkit.weights.checkpoint.manifest import Manifest
from labkit.weights.checkpoint.shard_file import ShardFile


class RankFiles:
    """The files of a checkpoint in a folder, as the manifest lists them. `config`: of the whole model."""

    def __init__(self, folder: Path, manifest: Manifest, config: ModelConfig) -> None:
        self.folder, self.manifest, self.config = folder, manifest, config
        self._files: dict[int, ShardFile] = {}

    @property
    def dtype(self) -> torch.dtype:
        return self.manifest.torch_dtype

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
        size, ep_size = self.manifest.tp_size, self.manifest.ep_size
        return tuple(shard(self.config, size, rank, ep_size) for rank in range(size))
