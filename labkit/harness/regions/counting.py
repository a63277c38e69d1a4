"""The least work of a region in a decode step: the counts of its op, averaged over the layers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from labkit.harness.shapes import layer_shape
from labkit.kernels.decode_step.cases import layer_cases
from labkit.kernels.layer_ops import Pass
from labkit.kernels.shapes import OpCase, Sizes
from labkit.models.config import ModelConfig
from labkit.stages import Stage


def region_bytes(config: ModelConfig, region: Stage, dtype: torch.dtype, batch: int, context: int) -> int:
    """Bytes that a region must read from memory: its weights once, and for attention the KV cache.

    A layer with a window reads only its window.
    """
    sizes = Sizes.of(dtype)
    return sum(case.bytes(batch, sizes) for case in _in_each_layer(config, region, context)) // config.num_layers


def region_flops(config: ModelConfig, region: Stage, batch: int, context: int) -> int:
    """Multiplications and additions in a region's products."""
    return sum(case.flops(batch) for case in _in_each_layer(config, region, context)) // config.num_layers


def _in_each_layer(config: ModelConfig, region: Stage, context: int) -> Iterator[OpCase]:
    shape = layer_shape(config)
    return (layer_cases(shape, Pass(context, window=window))[region] for window in config.windows)
