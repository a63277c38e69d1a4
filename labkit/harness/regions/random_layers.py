"""Random layers of a model's shape in the engine's format, with a filled KV cache and one new row per sequence."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TypeVar, cast

import numpy as np
import psutil
import torch
from torch import Tensor

from labkit.engine.memory.heads import StoredHeads
from labkit.engine.memory.kv_cache import KVCache
from labkit.engine.memory.rotary import rotary_tables
from labkit.engine.memory.slots import SlotPool
from labkit.engine.runners.layer import Wiring
from labkit.harness.environment import last_level_cache
from labkit.harness.regions.records import LayerCase
from labkit.kernels import LayerWeights, ModelWeights, gpu
from labkit.kernels.gemm import packed
from labkit.kernels.gpu import CPU
from labkit.kernels.memory import Arena, Heap
from labkit.kernels.types import LayerCache, Norm, Rotary, Rows, float_dtype
from labkit.models.config import ModelConfig
from labkit.models.policies import POLICIES
from labkit.models.shards import shard
from labkit.system.errors import UserError
from labkit.system.rounding import ceil_div
from labkit.weights.capacity import model_bytes
from labkit.weights.quantise import Quantization
from labkit.weights.records import Builder
from labkit.weights.spec import WeightSpec

CACHES = 2  # size of all layers' weights / size of the last-level cache
MEMORY_SHARE = 0.3  # the largest part of the free memory for the weights of a side
LAYERS_AT_MOST, LAYERS_OF_TINY = 200, 8
ON_GPU_AT_LEAST = 8  # so that a step's work outside of its layers hardly counts
VOCABULARY = 64  # tiny, because the head is no region
Numbers = TypeVar("Numbers")


@dataclass(frozen=True)
class RandomLayers:
    """The same random layers in the formats of all sides, and the inputs of one decode step."""

    config: ModelConfig
    plain_dtype: torch.dtype  # in which unfused ops compute
    plain: tuple[LayerWeights, ...]  # unfused: matrices row by row, all tensors in `plain_dtype`
    own_gemm: tuple[LayerWeights, ...]  # the fused layers in the layout that the unfused sequence expects
    fused: ModelWeights  # in the format of `impl`
    wiring: Wiring
    hidden_NH: Tensor  # float32, for the fused ops
    rows: Rows
    rotary: Rotary | None  # float32, for the fused ops
    cache: KVCache

    @property
    def plain_rotary(self) -> Rotary | None:
        return self.rotary and as_type(self.rotary, self.plain_dtype)

    @property
    def slots(self) -> tuple[LayerCache, ...]:
        return tuple(self.cache.layer(index) for index in range(self.config.num_layers))


def random_layers(config: ModelConfig, case: LayerCase, dtype: torch.dtype) -> RandomLayers:
    """`case.layers` random layers of the shape of `config`, with matrices of `dtype` on the fused side.

    Raises UserError for a model with experts.
    """
    _require_one_mlp(config)
    device = gpu.default_device() if case.impl == "triton" else CPU
    layers = (number % config.num_layers for number in range(case.layers))
    config = replace(config.with_layers(layers), vocab_size=VOCABULARY)
    plain_dtype = float_dtype(dtype)
    generator = torch.Generator().manual_seed(0)
    tensors, top = _draw(config.layer_shapes(), generator), _draw(config.top_shapes(), generator)
    spec = WeightSpec(policy=POLICIES[config.architecture], part=shard(config), dtype=dtype, impl=case.impl)
    plain = _build(replace(spec, dtype=plain_dtype, impl="reference"), tensors, top, device)
    fused = _build(spec, tensors, top, device)
    interleaved = config.gated and case.impl == "cpp"
    hidden = torch.randn(case.batch, config.hidden_size, generator=generator).to(device)
    cache, rows = _filled_cache(config, plain_dtype, case, generator, device)
    return RandomLayers(
        config=config,
        plain_dtype=plain_dtype,
        plain=tuple(as_type(layer, plain_dtype) for layer in plain.layers),
        own_gemm=tuple(map(_with_own_gemm, fused.layers, plain.layers)) if interleaved else fused.layers,
        fused=fused,
        wiring=Wiring(fused.heads, config.parallel_residual, fused.residual_from_norm),
        hidden_NH=hidden,
        rows=rows,
        rotary=rotary_tables(config.rotaries, case.context + 1, device),
        cache=cache,
    )


def random_model(config: ModelConfig, dtype: torch.dtype, impl: str, device: torch.device) -> ModelWeights:
    """Random weights of a shape in the format of `impl`, the same in all layers. With int8 the LM head is int8 too.

    Raises UserError for a model with experts.
    """
    _require_one_mlp(config)
    generator = torch.Generator().manual_seed(0)
    layer, top = _draw(config.layer_shapes(), generator), _draw(config.top_shapes(), generator)
    quant = Quantization(lm_head=dtype == torch.int8)
    spec = WeightSpec(policy=POLICIES[config.architecture], part=shard(config), dtype=dtype, impl=impl, quant=quant)
    return _build(spec, layer, top, device)


def _require_one_mlp(config: ModelConfig) -> None:
    if config.experts is not None:
        raise UserError(
            f"{config.architecture} has experts, and the regions are those of a layer with one MLP; expected a dense "
            "model, such as llama-shape"
        )


def gpu_step(layers: RandomLayers) -> Callable[[], object]:
    """A step through the fused layers as the engine runs them on a GPU, always at the same write position. The
    embedding and the head are tiny.
    """
    from labkit.kernels.decode_step.triton_ends import Buffers, StepInputs, StepState
    from labkit.kernels.decode_step.triton_impl import TritonStep

    weights, device = layers.fused, layers.hidden_NH.device
    step, buffers = TritonStep(weights, gpu.default_launcher()), Buffers(weights, layers.rows.batch, device)
    slot_state, slots = layers.cache.slots, layers.slots
    tokens = torch.zeros(layers.rows.batch, dtype=torch.int64, device=device)
    rows = replace(layers.rows, positions=layers.rows.positions.clone())

    def run() -> None:
        state = StepState(tokens, rows.positions.clone(), slot_state.past.clone())
        caches = [replace(slot, counter=state.past) for slot in slots]
        inputs = StepInputs(state, buffers, rows, layers.rotary, caches)
        step(inputs, lambda name, layer: nullcontext(), greedy=True)

    return run


def layers_beyond_caches(config: ModelConfig, dtype: torch.dtype, device: torch.device = CPU) -> int:
    """The number of layers that take twice the last-level cache: at least two (on a GPU eight), at most as many as fit
    into memory.

    A shape that would need more than LAYERS_AT_MOST gets LAYERS_OF_TINY, because its whole model fits into the caches.
    """
    shapes = config.layer_shapes().values()
    size = dtype.itemsize * sum(int(np.prod(shape)) for shape in shapes)
    on_gpu = device.type == "cuda"
    target = CACHES * (torch.cuda.get_device_properties(device).L2_cache_size if on_gpu else last_level_cache())
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else psutil.virtual_memory().available
    limit = MEMORY_SHARE * free
    if 2 * size > limit:
        raise UserError(
            f"two layers of {size / 1e9:.1f} GB, packed and unpacked, need more than {MEMORY_SHARE:.0%} each of the "
            f"{free / 1e9:.0f} GB that are free; use a smaller shape or dtype"
        )
    if LAYERS_AT_MOST * size < target:
        return LAYERS_OF_TINY
    return max(2, min(max(ceil_div(target, size), ON_GPU_AT_LEAST if on_gpu else 2), int(limit / size)))


def as_type(record: Numbers, dtype: torch.dtype) -> Numbers:
    """The record with every float32 tensor in it, at any depth, converted to `dtype`."""
    if isinstance(record, Tensor):
        return cast(Numbers, record.to(dtype)) if record.dtype == torch.float32 else record
    if not is_dataclass(record):
        return record
    assert not isinstance(record, type)
    changed = {field.name: as_type(getattr(record, field.name), dtype) for field in fields(record)}
    return replace(record, **changed)


def tensors_of(value: object) -> list[Tensor]:
    """The tensors in a record or a sequence, at any depth; a tensor may occur more than once."""
    if isinstance(value, Tensor):
        return [value]
    if is_dataclass(value):
        value = [getattr(value, field.name) for field in fields(value)]
    parts = value if isinstance(value, list | tuple) else ()
    return [tensor for part in parts for tensor in tensors_of(part)]


def _build(spec: WeightSpec, layer: dict[str, Tensor], top: dict[str, Tensor], device: torch.device) -> ModelWeights:
    place = Arena.reserved(model_bytes(spec)) if spec.impl == "cpp" else Heap(device)
    builder = Builder(spec, place)
    layers = [builder.layer(index, layer, Norm()) for index in spec.part.layers]
    return builder.model(layers, builder.outside(top), Norm())


def _with_own_gemm(fused: LayerWeights, plain: LayerWeights) -> LayerWeights:
    """The fused layer with the up matrix after the gate matrix, as the unfused sequence expects them."""
    return replace(
        fused, mlp=replace(fused.dense, region=replace(fused.dense.region, up=packed(plain.dense.region.up)))
    )


def _draw(shapes: dict[str, tuple[int, ...]], generator: torch.Generator) -> dict[str, Tensor]:
    """Random tensors: matrices that keep the size of their rows, norms around 1, small biases."""
    drawn = {}
    for name, shape in shapes.items():
        tensor = torch.randn(shape, generator=generator)
        if len(shape) == 2:
            drawn[name] = tensor.mul_(shape[1] ** -0.5)
        else:
            drawn[name] = tensor.mul_(0.1) if name.endswith(".bias") else tensor.mul_(0.1).add_(1)
    return drawn


def _filled_cache(
    config: ModelConfig, dtype: torch.dtype, case: LayerCase, generator: torch.Generator, device: torch.device
) -> tuple[KVCache, Rows]:
    pool = SlotPool(config, dtype, device) if case.impl == "triton" else None
    cache = KVCache(config, dtype, case.context + 1, pool)
    cache.reserve(case.batch, case.context + 1)
    assert isinstance(cache.heads, StoredHeads)
    for tensor in cache.heads.tensors:
        filled = tensor[:, :, : case.context, : config.head_dim]
        filled.copy_(torch.randn(filled.shape, generator=generator))
    cache.length = cache.reach = case.context
    return cache, cache.place(case.batch, 1)
