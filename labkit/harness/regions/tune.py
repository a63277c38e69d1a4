"""`labkit tune` finds the fastest tile sizes of the Triton kernels on this GPU.

The tiles are varied one kernel at a time, while the whole decode step runs as a CUDA graph through more layers than the
caches hold. So a tile is timed together with the kernels of the step, and not alone. All tiles read the same weights in
the same memory, whose place favours none of them, so they are timed one after the other, by the GPU's own clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
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
from labkit.kernels.decode_step.triton_ends import LEAST_ROWS
from labkit.kernels.tuned import Tile, TunedTiles, tuned_tiles, write_tiles
from labkit.models.config import ModelConfig
from labkit.models.dtypes import dtype_of
from labkit.system.bounds import check_numbers
from labkit.system.errors import UserError
from labkit.system.progress import Progress, unheard
from labkit.system.rounding import ceil_div

LAYERS = 6
CONTEXT = 512
REPLAYS = 30
THREADS = 32  # of a warp
GAIN = 0.995  # a new tile must take less than this part of the time before: the noise of a median
Timer = Callable[[GpuDecoder], float]


@dataclass(frozen=True)
class TunedTile:
    """The best tile of a kernel."""

    key: str  # of the kernel
    tile: Tile
    before_us: float  # microseconds of a step with the previous tile
    after_us: float  # microseconds of a step with this tile


def tune(
    models: Sequence[str] = ("gpt-j-6b",),
    *,
    dtypes: Sequence[str] = ("float16",),
    batches: Sequence[int] = (1,),
    progress: Progress | None = None,
    timer: Timer | None = None,
) -> tuple[Path, tuple[TunedTile, ...]]:
    """Tunes the decode steps of the shapes. Writes the file of this GPU model after each kernel, so a stopped run can
    continue. Returns the file and the best tile of every kernel.

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
    best: dict[str, TunedTile] = {}
    configs = {model: shape_of(model) for model in models}
    path = write_tiles(name, TunedTiles(tiles))
    follow = progress or unheard
    cases = [(model, dtype, batch) for model in models for dtype in dtypes for batch in batches]
    for done, (model, dtype, batch) in enumerate(cases):
        follow(done, len(cases), f"{model} {dtype}, batch {batch}")
        step = Step(configs[model], dtype_of(dtype), batch, timer or graph_us)
        for tuned in step.tune(tiles):
            tiles[tuned.key], best[tuned.key] = tuned.tile, tuned
            path = write_tiles(name, TunedTiles(tiles))
            label = f"{model} {dtype}, batch {batch}: {tuned.key} {tuned.before_us:.0f} -> {tuned.after_us:.0f} µs"
            follow(done, len(cases), label)
    return path, tuple(best.values())


class Step:
    """The decode step of a few layers of a shape, which can be timed with any tiles."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, batch: int, timer: Timer) -> None:
        device = gpu.default_device()
        few = _few_layers(config)
        self.weights = random_model(few, dtype, "triton", device)
        self.batch, self.timer, self.device = batch, timer, device
        self.context = min(CONTEXT, (config.max_positions or CONTEXT) - 2)
        self.rotary = rotary_tables(config.rotaries, self.context + 2, device)
        self.pool = SlotPool(few, self.weights.cache_dtype, device)

    def tune(self, tiles: dict[str, Tile]) -> Iterator[TunedTile]:
        """Yields the best tile of each kernel that has one, in the order of a step."""
        from triton.errors import TritonError  # imported late: a machine without Triton never tunes

        launcher = _NotingLauncher(tiles=TunedTiles(tiles))
        best_us = self.time(launcher)
        for key, (batch, before) in launcher.keys.items():
            start_us, best = best_us, before
            for tile in candidates(batch, key, before):
                try:
                    took_us = self.time(gpu.Launcher(tiles=TunedTiles({**tiles, key: tile})))
                except (TritonError, RuntimeError, ValueError):
                    continue  # the tile needs too much shared memory or too many registers
                if took_us < GAIN * best_us:
                    best, best_us = tile, took_us
            tiles = {**tiles, key: best}
            yield TunedTile(key, best, start_us, best_us)

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


class _NotingLauncher(gpu.Launcher):
    """Notes every tile that a step uses."""

    def __init__(self, tiles: TunedTiles) -> None:
        super().__init__(tiles=tiles)
        self.keys: dict[str, tuple[int, Tile]] = {}

    def tile(self, op: str, weight_type: str, rows: int, outputs: int, inputs: int) -> Tile:
        tile = super().tile(op, weight_type, rows, outputs, inputs)
        key = TunedTiles.key(op, weight_type, gpu.padded_rows(rows), outputs, inputs)
        self.keys.setdefault(key, (gpu.padded_rows(rows), tile))
        return tile


def candidates(batch: int, key: str, before: Tile) -> Iterable[Tile]:
    """The tiles worth a trial for a kernel, without the present tile: for one row of activations, those whose threads
    have 64 or 128 bytes of the weight in their registers, which the machine code turns into loads of 16 bytes.
    """
    packed, four_bytes = "/int" in key, "/int" in key or "/float32" in key
    if batch == 1:
        inputs = int(key.rpartition("x")[2])
        in_row = ceil_div(inputs, 8 if "/int4" in key else 4) if packed else inputs
        tiles = [
            Tile(rows, THREADS * warps * numbers // rows, warps, stages)
            for warps in (2, 4)
            for numbers in ((16, 32) if four_bytes else (32, 64))
            for rows in (2, 4, 8, 16)
            for stages in (1, 2)
        ]
        tiles = [tile for tile in tiles if 128 <= tile.depth <= 4096 and (tile.stages == 1 or tile.depth < in_row)]
        if key.startswith("head_argmax"):
            tiles = [tile for tile in tiles if tile.rows >= LEAST_ROWS]
    else:
        depths = (64, 128) if packed else (64, 128, 256)
        tiles = [
            Tile(rows, depth, rows // 16, stages) for rows in (16, 32, 64, 128) for depth in depths for stages in (3, 5)
        ]
    return [tile for tile in tiles if tile != before]


def graph_us(decoder: GpuDecoder) -> float:
    """Microseconds of the latest step's graph: the median of several replays, by the GPU's clock."""
    assert decoder.last is not None
    graph = decoder.last.graph
    assert graph is not None
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    past, taken = decoder.last.inputs.state.past, []
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
    return config.with_layers(range(min(LAYERS, config.num_layers)))
