"""Ranks as threads: what each of several would build, save and load, in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from labkit.kernels import ModelWeights
from labkit.models.policies import policy_for
from labkit.models.shards import shard
from labkit.weights.build import build_weights
from labkit.weights.checkpoint.save import Gather, Saved, Saving
from labkit.weights.checkpoint.saved import SavedWeights, saved_weights
from labkit.weights.model_tensors import ModelTensors
from labkit.weights.protocol import TensorSource
from labkit.weights.quantise import Quantization, WeightQuantization

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
    impl: str = "cpp",
    quant: Quantization | None = None,
    keep: Any = None,
) -> ModelWeights:
    """The weights that rank `rank` of `size` has."""
    policy = policy_for(hf_config)
    config = policy.model_config(hf_config)
    tensors = ModelTensors(source) if isinstance(source, PreTrainedModel) else source
    part = shard(config, size, rank)
    quant = quant or quantization()
    return build_weights(policy, config, tensors, dtype, impl, quant, part=part, keep=keep)


def save(
    folder: Path,
    source: PreTrainedModel | TensorSource,
    hf_config: PretrainedConfig,
    dtype: torch.dtype = torch.float32,
    size: int = 1,
    *,
    impl: str = "cpp",
    quant: Quantization | None = None,
) -> SavedWeights:
    """A checkpoint that `size` ranks save together."""
    policy = policy_for(hf_config)
    config = policy.model_config(hf_config)
    quant = quant or quantization()
    what = Saved(config=config, hf_config=hf_config, dtype=dtype, impl=impl, quant=quant)

    def work(rank: int, gather: Gather) -> None:
        with Saving.begin(folder, what, shard(config, size, rank), gather) as saving:
            built(source, hf_config, dtype, size, rank, impl=impl, quant=quant, keep=saving.keep)
            saving.finish(None, None)

    as_ranks(size, work)
    return load(folder, hf_config)


def load(folder: Path, hf_config: PretrainedConfig) -> SavedWeights:
    policy = policy_for(hf_config)
    saved = saved_weights(folder, policy, policy.model_config(hf_config))
    assert saved is not None
    return saved


def as_ranks(size: int, work: Callable[[int, Gather], T]) -> list[T]:
    """The results of `work(rank, gather)`, each rank a thread."""
    slots: list[Any] = [None] * size
    barrier = Barrier(size, timeout=60)

    def gather_for(rank: int) -> Gather:
        def gather(own: Any) -> list[Any]:
            slots[rank] = own
            barrier.wait()
            found = list(slots)
            barrier.wait()
            return found

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
    """Every tensor of a record of records, by its path."""
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


def assert_same(got: ModelWeights, want: ModelWeights) -> None:
    """To the last bit."""
    have, expected = dict(tensors_in(got)), dict(tensors_in(want))
    assert have.keys() == expected.keys()
    different = [name for name in have if not torch.equal(have[name], expected[name])]
    assert not different, different
