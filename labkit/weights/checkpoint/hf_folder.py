"""A model as the checkpoint that `save_pretrained` would write, of which one tensor at a time is in memory."""

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
from labkit.weights.source import ModelSource, hf_shapes

SHARD_BYTES = 2_000_000_000  # of a file, but for one with a larger tensor


def write_checkpoint(
    source: ModelSource, dtype: torch.dtype, folder: Path, *, shard_bytes: int = SHARD_BYTES
) -> tuple[Path, ...]:
    """Write `source` into the folder, for transformers: config.json, its tensors rounded to `dtype` in files of about
    `shard_bytes`, and their index, which comes last. Returns the files of tensors.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(source.hf_config)
    config.dtype = dtype
    config.architectures = [policy_for(config).architecture]
    config.save_pretrained(folder)
    if source.generation_config is not None:
        source.generation_config.save_pretrained(folder)
    shapes = hf_shapes(source.hf_config)
    shards = list(_shards({name: dtype.itemsize * math.prod(shape) for name, shape in shapes.items()}, shard_bytes))
    files: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        with TensorWriter(folder / file, len(names), alignment=1) as writer:
            for name in names:
                writer.add(name, source.get(name, dtype))
            writer.finish({"format": "pt"})
        files |= dict.fromkeys(names, file)
    size = sum(dtype.itemsize * math.prod(shape) for shape in shapes.values())
    index = {"metadata": {"total_size": size}, "weight_map": files}
    write_whole(folder / SAFE_WEIGHTS_INDEX_NAME, json.dumps(index, indent=2) + "\n")
    return tuple(folder / file for file in sorted(set(files.values())))


def _shards(sizes: dict[str, int], most: int) -> Iterator[list[str]]:
    """The names of each file, in their order."""
    names: list[str] = []
    held = 0
    for name, size in sizes.items():
        if names and held + size > most:
            yield names
            names, held = [], 0
        names.append(name)
        held += size
    yield names
