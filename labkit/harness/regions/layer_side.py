"""Sides that run the same layers: op by op, or all layers in one call of the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from labkit.engine.runners.layer import OpRegions, Ops, Wiring
from labkit.harness.regions.clocks import RegionClock, Samples
from labkit.harness.regions.random_layers import RandomLayers
from labkit.harness.regions.sides import ONE_CALL
from labkit.harness.regions.vocabulary import REGIONS
from labkit.kernels import DecodeStep, LayerWeights
from labkit.kernels.decode_step import LAYER_STAGES, ChunkArgs, layer_times
from labkit.kernels.layer import run_layer
from labkit.kernels.types import LayerCache, Rotary, Rows
from labkit.stages import Stage


@dataclass(frozen=True)
class LayerSide:
    """One way to run the layers: ops, weights, activations and KV cache, in the types in which it computes."""

    name: str
    ops: Ops
    layers: tuple[LayerWeights, ...]
    wiring: Wiring
    hidden_NH: Tensor
    rows: Rows
    rotary: Rotary | None
    caches: tuple[LayerCache, ...]

    def step(self, around: Callable[[Stage], Any], *, only: int | None = None) -> Tensor:
        """Runs all layers, or the layer `only` equally often, and returns the hidden state after the last."""
        hidden = self.hidden_NH
        for index in range(len(self.layers)):
            at = index if only is None else only
            regions = OpRegions(self.ops, self.layers[at], self.wiring, hidden, self.rows, self.rotary, self.caches[at])
            hidden = run_layer(regions, around)
        return hidden

    def times(self, *, warm: bool = False) -> Samples:
        """Nanoseconds of every call in one step; if `warm`, in a second step through the first layer alone."""
        clock = RegionClock()
        with torch.inference_mode():
            if warm:
                self.step(clock.around, only=0)
                clock.samples_ns.clear()
            self.step(clock.around, only=0 if warm else None)
        return clock.samples_ns


class OneCall:
    """The fused layers as the engine runs them on a CPU: in one call, which times every region."""

    name = ONE_CALL

    def __init__(self, layers: RandomLayers, threads: int) -> None:
        self._layers, self._threads = layers, threads
        self._step = DecodeStep(layers.fused)

    def times(self) -> Samples:
        """Nanoseconds of every region of every layer in one step."""
        layers = self._layers
        tokens = torch.zeros(layers.rows.batch, 1, dtype=torch.int64)
        chunk = ChunkArgs(layers.rows, layers.cache.length, tokens)
        self._step.run([chunk], layers.rotary, layers.cache.c, threads=self._threads)
        spans = layer_times(self._step.times)
        return {region: spans[:, LAYER_STAGES.index(region)].tolist() for region in REGIONS}
