"""Ranks as threads of one process: several ranks build, save and load weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from labkit.kernels import ModelWeights
from labkit.models.policies import policy_for
from labkit.models.shards import shard
from labkit.system.collective import Gather
from labkit.weights.build import build_weights
from labkit.weights.checkpoint.save import Saving
from labkit.weights.checkpoint.saved import SavedWeights, saved_weights
from labkit.weights.model_tensors import ModelTensors
from labkit.weights.protocol import TensorSource
from labkit.weights.quantise import Quantization, WeightQuantization
from labkit.weights.spec import WeightSpec

T = TypeVar("T")


def quantization(lm_head: bool = False, **weight: Any) -> Quantization:
    return Quantization(weight=WeightQuantization(**weight), lm_head=lm_head)


def built(
    source: PreTrainedModel | TensorSource,
    hf_config: PretrainedConfig,
    dtype: torch.dtype,
    size: int = 1,
    rank: int = 0,
    *,
    ep_size: int = 1,
    impl: str = "cpp",
    quant: Quantization | None = None,
    keep: Any = None,
) -> ModelWeights:
    """Weights of rank `rank` out of `size`."""
    tensors = ModelTensors(source) if isinstance(source, PreTrainedModel) else source
    spec = WeightSpec.of(hf_config, dtype, impl, quant or quantization())
    return build_weights(replace(spec, part=shard(spec.config, size, rank, ep_size)), tensors, keep=keep)


def save(
    folder: Path,
    source: PreTrainedModel | TensorSource,
    hf_config: PretrainedConfig,
    dtype: torch.dtype = torch.float32,
    size: int = 1,
    *,
    ep_size: int = 1,
    impl: str = "cpp",
    quant: Quantization | None = None,
) -> SavedWeights:
    """Saves a checkpoint from `size` ranks together; returns the loaded weights."""
    spec = WeightSpec.of(hf_config, dtype, impl, quant or quantization())

    def work(rank: int, gather: Gather) -> None:
        own = replace(spec, part=shard(spec.config, size, rank, ep_size))
        with Saving.begin(folder, own, hf_config, gather) as saving:
            built(source, hf_config, dtype, size, rank, ep_size=ep_size, impl=impl, quant=quant, keep=saving.keep)
            saving.finish(None, None)

    as_ranks(size, work)
    return load(folder, hf_config)


def load(folder: Path, hf_config: PretrainedConfig) -> SavedWeights:
    policy = policy_for(hf_config)
    saved = saved_weights(folder, policy, policy.model_config(hf_config))
    assert saved is not None
    return saved


def as_ranks(size: int, work: Callable[[int, Gather], T]) -> list[T]:
    """Results of `work(rank, gather)`, with a thread for each rank."""
    slots: list[Any] = [None] * size
    barrier = Barrier(size, timeout=60)

    def gather_for(rank: int) -> Gather:
        def gather(value: Any) -> list[Any]:
            slots[rank] = value
            barrier.wait()
            gathered = list(slots)
            barrier.wait()
            return gathered

        return gather

    def run(rank: int) -> T:
        try:
            return work(rank, gather_for(rank))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        running = [pool.submit(run, rank) for rank in range(size)]
    errors = [rank.exception() for rank in running]
    for error in errors:
        if error is not None and not isinstance(error, BrokenBarrierError):
            raise error
    return [rank.result() for rank in running]


def tensors_in(record: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a nested record, with its path."""
    if isinstance(record, Tensor):
        yield path, record
    elif isinstance(record, tuple):
        for index, inner in enumerate(record):
            yield from tensors_in(inner, f"{path}.{index}")
    elif is_dataclass(record):
        for field in fields(record):
            yield from tensors_in(getattr(record, field.name), f"{path}.{field.name}")
    else:
        yield path, torch.tensor([hash(record)])


def assert_same(actual: ModelWeights, expected: ModelWeights) -> None:
    """Fails unless both weights are equal to the last bit."""
    actual_tensors, expected_tensors = dict(tensors_in(actual)), dict(tensors_in(expected))
    assert actual_tensors.keys() == expected_tensors.keys()
    different = [name for name in actual_tensors if not torch.equal(actual_tensors[name], expected_tensors[name])]
    assert not different, different
