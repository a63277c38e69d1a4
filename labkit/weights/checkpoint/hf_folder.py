"""Writes a model as the checkpoint that `save_pretrained` would write, with one tensor at a time in memory."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from labkit.models.policies import policy_for
from labkit.system.whole_file import write_whole
from labkit.weights.checkpoint.tensor_writer import TensorWriter
from labkit.weights.hf_tensors import CheckpointTensors
from labkit.weights.source import ModelSource, hf_shapes

SHARD_BYTES = 2_000_000_000  # most bytes of a file, unless a single tensor is larger


def write_checkpoint(
    source: ModelSource, dtype: torch.dtype, folder: Path, *, shard_bytes: int = SHARD_BYTES
) -> tuple[Path, ...]:
    """Writes `source` into the folder, for transformers: config.json, the tensors rounded to `dtype` in files of about
    `shard_bytes`, and at last their index. Returns the files of tensors.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(source.hf_config)
    config.dtype = dtype
    config.architectures = [policy_for(config).architecture]
    config.save_pretrained(folder)
    if source.generation_config is not None:
        source.generation_config.save_pretrained(folder)
    tensors = CheckpointTensors(source, source.hf_config, hf_shapes(source.hf_config))
    shapes = tensors.shapes
    shards = list(_shards({name: dtype.itemsize * math.prod(shape) for name, shape in shapes.items()}, shard_bytes))
    files: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        with TensorWriter(folder / file, len(names), alignment=1) as writer:
            for name in names:
                writer.add(name, tensors.get(name, dtype))
            writer.finish({"format": "pt"})
        files |= dict.fromkeys(names, file)
    size = sum(dtype.itemsize * math.prod(shape) for shape in shapes.values())
    index = {"metadata": {"total_size": size}, "weight_map": files}
    write_whole(folder / SAFE_WEIGHTS_INDEX_NAME, json.dumps(index, indent=2) + "\n")
    return tuple(folder / file for file in sorted(set(files.values())))


def _shards(sizes: dict[str, int], most: int) -> Iterator[list[str]]:
    """The names of the tensors of each file, in order."""
    names: list[str] = []
    total = 0
    for name, size in sizes.items():
        if names and total + size > most:
            yield names
            names, total = [], 0
        names.append(name)
        total += size
    yield names
