"""The layers of each stage of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from labkit.models.shards import evenly, shard
from labkit.system.errors import UserError
from labkit.weights.capacity import layer_bytes, outside_bytes
from labkit.weights.spec import WeightSpec


def split_layers(spec: WeightSpec, stages: int, counts: Sequence[int] | None = None) -> tuple[range, ...]:
    """Consecutive layers for each stage. counts: their numbers; None: balanced by the bytes of weights per step, which
    include the LM head, but not the embedding, because a step reads only a few of its rows.

    Raises UserError for more stages than layers, and for `counts` that do not add up to the model's layers.
    """
    layers = spec.config.num_layers
    if stages > layers:
        raise UserError(f"pp_size={stages} stages for {layers} layers; use pp_size <= {layers}")
    if counts is not None and (sum(counts) != layers or min(counts) < 1):
        raise UserError(
            f"pipeline_parallel: layers={list(counts)} are {sum(counts)} layers, the model has {layers}; expected "
            f"{stages} numbers from 1 on that add up to {layers}"
        )
    counts = _balanced(spec, stages) if counts is None else counts
    return tuple(range(begin, end) for begin, end in pairwise(accumulate(counts, initial=0)))


def _balanced(spec: WeightSpec, stages: int) -> list[int]:
    """Numbers of layers: the stage with the most bytes gets as few as possible, then the other stages are balanced."""
    config = spec.config
    if stages == 1:
        return [config.num_layers]
    layer = layer_bytes(spec)
    ends = shard(config, layers=range(config.num_layers - 1, config.num_layers), embedding=False, head=True)
    head = outside_bytes(replace(spec, part=ends))

    def counts(in_last: int) -> list[int]:
        return [len(part) for part in evenly(config.num_layers - in_last, stages - 1)] + [in_last]

    def reads(in_last: int) -> list[int]:
        *before, last = counts(in_last)
        return sorted([*(count * layer for count in before), last * layer + head], reverse=True)

    return counts(min(range(1, config.num_layers - stages + 2), key=reads))
