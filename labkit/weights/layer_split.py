"""Which layers each stage of a pipeline holds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch

from labkit.models.config import ModelConfig
from labkit.models.shards import evenly, shard
from labkit.system.errors import UserError
from labkit.weights.capacity import layer_bytes, outside_bytes
from labkit.weights.quantise import Quantization


def split_layers(
    config: ModelConfig, stages: int, dtype: torch.dtype, quant: Quantization, given: Sequence[int] | None = None
) -> tuple[range, ...]:
    """Consecutive layers for each of the stages: so many as `given`, or so that a step reads about as many bytes of
    weights in each, the LM head's counted; the embedding is only looked up.

    Raises UserError for more stages than layers, and for given numbers that do not add up to the model's.
    """
    layers = config.num_layers
    if stages > layers:
        raise UserError(f"pp_size={stages} stages for {layers} layers; use pp_size <= {layers}")
    if given is not None and (sum(given) != layers or min(given) < 1):
        raise UserError(
            f"pipeline_parallel: layers={list(given)} are {sum(given)} layers, the model has {layers}; expected "
            f"{stages} numbers from 1 on that add up to {layers}"
        )
    counts = list(given) if given is not None else _balanced(config, stages, dtype, quant)
    return tuple(range(begin, end) for begin, end in pairwise(accumulate(counts, initial=0)))


def _balanced(config: ModelConfig, stages: int, dtype: torch.dtype, quant: Quantization) -> list[int]:
    """The stage with the most bytes has as few as possible, then the others are as even as possible."""
    if stages == 1:
        return [config.num_layers]
    layer = layer_bytes(shard(config), dtype, quant)
    ends = shard(config, layers=range(config.num_layers - 1, config.num_layers), embedding=False, head=True)
    head = outside_bytes(ends, dtype, quant)

    def counts(of_last: int) -> list[int]:
        return [len(part) for part in evenly(config.num_layers - of_last, stages - 1)] + [of_last]

    def reads(of_last: int) -> list[int]:
        *before, last = counts(of_last)
        return sorted([*(each * layer for each in before), last * layer + head], reverse=True)

    return counts(min(range(1, config.num_layers - stages + 2), key=reads))
