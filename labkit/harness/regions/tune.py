"""`labkit tune`: the tile sizes of the Triton kernels that are fastest on this GPU, in place.

One kernel's tile after the other is varied while the whole decode step runs as a CUDA graph, through layers enough that
no cache holds them: a tile is judged among the kernels that it will run with, not by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from labkit.engine.memory.kv_cache import KVCache
from labkit.engine.memory.rotary import rotary_tables
from labkit.engine.memory.slots import SlotPool
from labkit.engine.runners.cuda_graph import GpuDecoder
from labkit.harness.regions.case import shape_of
from labkit.harness.regions.random_layers import random_model
from labkit.kernels import gpu
from labkit.kernels.tuned import Tile, TunedTiles, tuned_tiles, write_tiles
from labkit.models.config import ModelConfig
from labkit.models.dtypes import dtype_of
from labkit.system.bounds import check_numbers
from labkit.system.errors import UserError
from labkit.system.progress import Progress, unheard

LAYERS = 6
CONTEXT = 512
REPLAYS = 30
GAIN = 0.995  # of the time before, that a new tile must come below: the noise of a median
Timer = Callable[[GpuDecoder], float]


@dataclass(frozen=True)
class Found:
    """A kernel's tile and what it did to a step: microseconds with the tile before, and with this one."""

    key: str
    tile: Tile
    before_us: float
    after_us: float


def tune(
    models: Sequence[str] = ("gpt-j-6b",),
    *,
    dtypes: Sequence[str] = ("float16",),
    batches: Sequence[int] = (1,),
    progress: Progress | None = None,
    timer: Timer | None = None,
) -> tuple[Path, tuple[Found, ...]]:
    """Tunes the decode steps of the shapes and writes the file of this GPU model, after each kernel: what is stopped
    goes on from there. Returns the file and what was found for every kernel.

    ValueError without a GPU, and for an unknown model, dtype or batch.
    """
    gpu.require()
    if gpu.interpreted() and timer is None:
        raise UserError("labkit tune times kernels on an NVIDIA GPU, and found TRITON_INTERPRET=1; unset it")
    for dtype in dtypes:
        dtype_of(dtype)
    for batch in batches:
        check_numbers(batch=batch)
    name = gpu.gpu_name() or "interpreter"
    tiles = dict(tuned_tiles(name).tiles)
    found: dict[str, Found] = {}
    configs = {model: shape_of(model) for model in models}
    path = write_tiles(name, TunedTiles(tiles))
    follow = progress or unheard
    cases = [(model, dtype, batch) for model in models for dtype in dtypes for batch in batches]
    for done, (model, dtype, batch) in enumerate(cases):
        follow(done, len(cases), f"{model} {dtype}, batch {batch}")
        step = Step(configs[model], dtype_of(dtype), batch, timer or graph_us)
        for each in step.tune(tiles):
            tiles[each.key], found[each.key] = each.tile, each
            path = write_tiles(name, TunedTiles(tiles))
            label = f"{model} {dtype}, batch {batch}: {each.key} {each.before_us:.0f} -> {each.after_us:.0f} µs"
            follow(done, len(cases), label)
    return path, tuple(found.values())


class Step:
    """The decode step of a few layers of a shape, to be timed with any tiles."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, batch: int, timer: Timer) -> None:
        device = gpu.default_device()
        few = _few_layers(config)
        self.weights = random_model(few, dtype, "triton", device)
        self.batch, self.timer, self.device = batch, timer, device
        self.context = min(CONTEXT, (config.max_positions or CONTEXT) - 2)
        self.rotary = rotary_tables(config.rotary, self.context + 2, device) if config.rotary else None
        self.pool = SlotPool(few, self.weights.cache_dtype, device)

    def tune(self, tiles: dict[str, Tile]) -> Iterator[Found]:
        """One `Found` per kernel that has a tile, in the order of a step."""
        from triton.errors import TritonError  # where there is no Triton, there is nothing to tune

        asked = _Asked(tiles=TunedTiles(tiles))
        best_us = self.time(asked)
        for key, (batch, before) in asked.keys.items():
            start_us, best = best_us, before
            for tile in candidates(batch, key, before):
                try:
                    took_us = self.time(gpu.Launcher(tiles=TunedTiles({**tiles, key: tile})))
                except (TritonError, RuntimeError, ValueError):  # more shared memory or registers than there are
                    continue
                if took_us < GAIN * best_us:
                    best, best_us = tile, took_us
            tiles = {**tiles, key: best}
            yield Found(key, best, start_us, best_us)

    def time(self, launch: gpu.Launcher) -> float:
        """Microseconds of a step with the launcher's tiles."""
        cache = KVCache(self.pool.config, self.weights.cache_dtype, self.context + 2, self.pool)
        cache.reserve(self.batch, self.context + 2)
        cache.length = cache.reach = self.context
        decoder = GpuDecoder(self.weights, launch, self.device, graphs=self.device.type == "cuda")
        tokens = torch.zeros(self.batch, 1, dtype=torch.int64, device=self.device)
        cache.slots.recordings.clear()
        decoder(tokens, cache, self.rotary, greedy=True)
        return self.timer(decoder)


class _Asked(gpu.Launcher):
    """Notes every tile that a step asks for."""

    def __init__(self, tiles: TunedTiles) -> None:
        super().__init__(tiles=tiles)
        self.keys: dict[str, tuple[int, Tile]] = {}

    def tile(self, op: str, weight_type: str, rows: int, outputs: int, inputs: int) -> Tile:
        tile = super().tile(op, weight_type, rows, outputs, inputs)
        key = TunedTiles.key(op, weight_type, gpu.padded_rows(rows), outputs, inputs)
        self.keys.setdefault(key, (gpu.padded_rows(rows), tile))
        return tile


def candidates(batch: int, key: str, before: Tile) -> Iterable[Tile]:
    """The tiles worth a trial for a kernel: neighbours of what the machine code suggests, the present one left out."""
    words = "/int" in key
    depths: tuple[int, ...]
    if batch == 1:
        depths = (256, 512, 1024) if words else (512, 1024, 2048)
        every = [Tile(rows, depth, warps) for rows in (4, 8, 16) for depth in depths for warps in (4, 8)]
        every = [tile for tile in every if tile.rows * tile.depth <= 16384]
    else:
        depths = (64, 128) if words else (64, 128, 256)
        every = [
            Tile(rows, depth, rows // 16, stages) for rows in (16, 32, 64, 128) for depth in depths for stages in (3, 5)
        ]
    return [tile for tile in every if tile != before]


def graph_us(decoder: GpuDecoder) -> float:
    """Microseconds of the latest step's graph: the median of several replays, by the GPU's clock."""
    assert decoder.last is not None
    graph = decoder.last.graph
    assert graph is not None
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    past, taken = decoder.last.state.past, []
    at = int(past) - 1
    for _ in range(REPLAYS):
        past.fill_(at)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) * 1e3)
    return float(np.median(taken))


def _few_layers(config: ModelConfig) -> ModelConfig:
    count = min(LAYERS, config.num_layers)
    scales, windows = config.attention_scales[:count], config.windows[:count]
    return replace(config, num_layers=count, attention_scales=scales, windows=windows)
