"""Region by region: a decode step's layers, unfused and fused, on the same numbers.

Three ways to run the same ops, so that what a better GEMM gives and what fusion gives are not mixed up: unfused torch
ops with torch's GEMM, the same with labkit's GEMM, and the fused kernels. The layers are as many as no cache can hold,
so that each call reads its weights from memory, as in a decode step; "warm" runs one layer again and again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from time import perf_counter_ns
from types import TracebackType
from typing import Any, TypeVar, cast

import numpy as np
import psutil
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from labkit.engine.memory.kv_cache import KVCache
from labkit.engine.memory.rotary import rotary_tables
from labkit.engine.memory.slots import SlotPool
from labkit.engine.runners.layer import Ops, Wiring, ops, run_layer
from labkit.harness.environment import last_level_cache
from labkit.harness.regions.sides import FUSED, ONE_CALL, OWN_GEMM, SDPA, UNFUSED
from labkit.kernels import DecodeStep, LayerWeights, ModelWeights, gpu
from labkit.kernels.attention.reference import attention as unfused_attention
from labkit.kernels.decode_step import STAGES_PER_LAYER
from labkit.kernels.gemm import gemm, packed
from labkit.kernels.gpu import CPU
from labkit.kernels.memory import Arena, Heap
from labkit.kernels.mlp_gemm.reference import mlp_gemm as unfused_mlp_gemm
from labkit.kernels.plain import linear
from labkit.kernels.qkv_gemm.reference import qkv_gemm as unfused_qkv_gemm
from labkit.kernels.residual_add.reference import residual_add as unfused_residual_add
from labkit.kernels.types import AttentionParams, Heads, LayerCache, Linear, Norm, Rotary, Rows, float_dtype
from labkit.models.config import ModelConfig
from labkit.models.shards import shard
from labkit.stages import Stage
from labkit.system.errors import UserError
from labkit.weights.capacity import model_bytes
from labkit.weights.quantise import Quantization
from labkit.weights.records import Builder

REGIONS = tuple(Stage(name) for name in STAGES_PER_LAYER)
WITH_GEMM = (Stage.QKV, Stage.ATTN_OUT, Stage.MLP, Stage.MLP_OUT)
CACHES = 2  # times the last-level cache that the weights of all layers take
MEMORY_SHARE = 0.3  # of what is free, at most, for the weights of a side
LAYERS_AT_MOST, LAYERS_OF_TINY = 200, 8
ON_GPU_AT_LEAST = 8  # so that what a step does outside its layers hardly counts
VOCABULARY = 64  # the head is no region
Record = TypeVar("Record")
Samples = dict[Stage, list[int]]  # nanoseconds, call by call


class RegionClock:
    """The wall time of each region, call by call; give `around` to `run_layer`."""

    def __init__(self) -> None:
        self.samples_ns: Samples = defaultdict(list)
        self._region = REGIONS[0]
        self._start = 0

    def around(self, region: Stage) -> RegionClock:
        self._region = region
        return self

    def __enter__(self) -> None:
        self._start = perf_counter_ns()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.samples_ns[self._region].append(perf_counter_ns() - self._start)


@dataclass
class Counted:
    """Torch ops that compute or copy (views don't count), by name, and the bytes of what they read and write."""

    ops: list[str] = field(default_factory=list)
    bytes: int = 0


class OpCounter(TorchDispatchMode):
    """Counts the torch ops of each region; give `around` to `run_layer`."""

    def __init__(self) -> None:
        super().__init__()
        self.regions: dict[Stage, Counted] = defaultdict(Counted)
        self._region = REGIONS[0]

    def around(self, region: Stage) -> AbstractContextManager[None]:
        self._region = region
        return nullcontext()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        aliases = [value.alias_info for value in func._schema.returns]
        is_view = name == "_unsafe_view" or all(alias is not None and not alias.is_write for alias in aliases)
        if not is_view:
            tensors = [*_tensors(args), *_tensors(kwargs or {}), *_tensors(result)]
            counted = self.regions[self._region]
            counted.ops.append(name)
            counted.bytes += sum(tensor.numel() * tensor.itemsize for tensor in tensors)
        return result


@dataclass(frozen=True)
class Side:
    """One way to run the layers: its ops, weights, activations and KV cache, in the types that it computes with."""

    name: str
    ops: Ops
    layers: tuple[LayerWeights, ...]
    wiring: Wiring
    hidden_NH: Tensor
    rows: Rows
    rotary: Rotary | None
    caches: tuple[LayerCache, ...]

    def step(self, around: Callable[[Stage], Any], *, only: int | None = None) -> Tensor:
        """All layers, or layer `only` as often; the hidden state after the last."""
        hidden = self.hidden_NH
        for index in range(len(self.layers)):
            at = index if only is None else only
            hidden = run_layer(
                self.ops, self.layers[at], self.wiring, hidden, self.rows, self.rotary, self.caches[at], around
            )
        return hidden

    def times(self, *, warm: bool = False) -> Samples:
        """Nanoseconds of every call in one step. Warm: of one layer, after a first step over it."""
        clock = RegionClock()
        with torch.inference_mode():
            if warm:
                self.step(clock.around, only=0)
                clock.samples_ns.clear()
            self.step(clock.around, only=0 if warm else None)
        return clock.samples_ns


@dataclass(frozen=True)
class OneCall:
    """The fused layers as the engine runs them: all in one call, which stamps the clock between regions."""

    step: DecodeStep
    rows: Rows
    rotary: Rotary | None
    cache: KVCache
    threads: int
    name: str = ONE_CALL

    def times(self) -> Samples:
        tokens = torch.zeros(self.rows.batch, 1, dtype=torch.int64)
        past = self.cache.length
        self.step(tokens, self.rows, self.rotary, self.cache.c, past, keep=0, threads=self.threads)
        layers = len(self.step.model.layers)
        spans = np.diff(self.step.stamps[1 : 2 + layers * len(REGIONS)]).reshape(layers, len(REGIONS))
        return {region: spans[:, index].tolist() for index, region in enumerate(REGIONS)}


@dataclass(frozen=True)
class LayerStack:
    """Enough layers of a model's shape that no cache holds them, with a KV cache of `context` tokens."""

    config: ModelConfig
    dtype: torch.dtype
    batch: int
    context: int
    threads: int
    sides: tuple[Side, ...]
    one_call: OneCall | None
    gpu_step: Callable[[], object] | None

    def side(self, name: str) -> Side:
        return next(side for side in self.sides if side.name == name)

    def with_fused(self, regions: Container[Stage]) -> Side:
        """The unfused side with these regions fused; rows are converted where a region computes in another type."""
        slow, fast = self.side(UNFUSED), self.side(FUSED)
        pairs = zip(slow.layers, fast.layers, strict=True)
        layers = tuple(_mixed(plain, fused, regions, parallel=slow.wiring.parallel) for plain, fused in pairs)

        def op(region: Stage, name: str) -> Callable[..., Any]:
            side = fast if region in regions else slow
            return _taking(getattr(side.ops, name), side.hidden_NH.dtype, convert=slow.hidden_NH.dtype != torch.float32)

        mixed = Ops(
            op(Stage.QKV, "qkv_gemm"),
            op(Stage.ATTENTION, "attention"),
            op(Stage.ATTN_OUT, "gemm"),
            op(Stage.MLP, "mlp_gemm"),
            op(Stage.RESIDUAL, "residual_add"),
        )
        rotary = fast.rotary if Stage.QKV in regions else slow.rotary
        return replace(slow, name="partly fused", ops=mixed, layers=layers, rotary=rotary)

    def counted(self) -> dict[Stage, Counted]:
        """What one layer of the unfused sequence comes to, region by region."""
        side = replace(self.side(UNFUSED), layers=self.side(UNFUSED).layers[:1])
        counter = OpCounter()
        with torch.no_grad(), counter:
            side.step(counter.around)
        return dict(counter.regions)


def layer_stack(
    config: ModelConfig,
    dtype: torch.dtype,
    impl: str = "cpp",
    *,
    batch: int,
    context: int,
    threads: int,
    layers: int | None = None,
) -> LayerStack:
    """Layers of the shape of `config`, random, the same for all sides; `layers` None: as many as it takes."""
    torch.set_num_threads(threads)
    device = gpu.default_device() if impl == "triton" else CPU
    count = layers or layers_beyond_caches(config, dtype, device)
    config = replace(
        config,
        num_layers=count,
        vocab_size=VOCABULARY,
        windows=_cycled(config.windows, count),
        attention_scales=_cycled(config.attention_scales, count),
    )
    plain_dtype = float_dtype(dtype)
    generator = torch.Generator().manual_seed(0)
    tensors = _draw(config.layer_shapes(), generator)
    top = _draw(config.top_shapes(), generator)
    plain = _build(config, plain_dtype, "reference", tensors, top, device)
    fused = _build(config, dtype, impl, tensors, top, device)
    native = tuple(_as_type(layer, plain_dtype) for layer in plain.layers)
    interleaved = config.gated and impl == "cpp"
    own = tuple(map(_with_own_gemm, fused.layers, plain.layers)) if interleaved else fused.layers

    hidden = torch.randn(batch, config.hidden_size, generator=generator).to(device)
    tables = rotary_tables(config.rotary, context + 1, device) if config.rotary else None
    native_tables = tables and _as_type(tables, plain_dtype)
    wiring = Wiring(fused.heads, config.parallel_residual, fused.residual_from_norm)
    pool = SlotPool(config, plain_dtype, device) if impl == "triton" else None
    cache, rows = _filled_cache(config, plain_dtype, batch, context, generator, pool)
    slots = tuple(cache.layer(index) for index in range(count))
    all_seen = all(window is None or window > context for window in config.windows)
    attention = partial(unfused_attention, all_seen=all_seen)
    vanilla = _unfused(linear, attention)
    fast = ops(impl, threads)
    own_gemm = replace(
        _unfused(partial(gemm, threads=threads, impl=impl), fast.attention), residual_add=fast.residual_add
    )
    here = hidden.to(plain_dtype)
    sides = [
        Side(UNFUSED, vanilla, native, wiring, here, rows, native_tables, slots),
        Side(OWN_GEMM, own_gemm, own, wiring, hidden, rows, tables, slots),
        Side(FUSED, fast, fused.layers, wiring, hidden, rows, tables, slots),
    ]
    if all_seen and config.position != "alibi":
        sides.append(replace(sides[0], name=SDPA, ops=replace(vanilla, attention=_sdpa)))
    one_call = OneCall(DecodeStep(fused), rows, tables, cache, threads) if impl == "cpp" else None
    gpu_step = _gpu_step(fused, rows, tables, cache, slots, device) if impl == "triton" else None
    return LayerStack(config, dtype, batch, context, threads, tuple(sides), one_call, gpu_step)


def random_model(config: ModelConfig, dtype: torch.dtype, impl: str, device: torch.device) -> ModelWeights:
    """Random weights of a shape, the same in all layers, as `impl` reads them; int8 with the LM head."""
    generator = torch.Generator().manual_seed(0)
    layer, top = _draw(config.layer_shapes(), generator), _draw(config.top_shapes(), generator)
    return _build(config, dtype, impl, layer, top, device, Quantization(lm_head=dtype == torch.int8))


def _gpu_step(
    weights: ModelWeights,
    rows: Rows,
    rotary: Rotary | None,
    cache: KVCache,
    slots: tuple[LayerCache, ...],
    device: torch.device,
) -> Callable[[], object]:
    """The fused layers as the engine runs them on a GPU, always at the same slot; embedding and head are tiny."""
    from labkit.kernels.decode_step.triton_impl import Buffers, StepState, TritonStep

    step, buffers = TritonStep(weights, gpu.default_launcher()), Buffers(weights, rows.batch, device)
    held = cache.slots
    tokens = torch.zeros(rows.batch, dtype=torch.int64, device=device)
    rows = replace(rows, positions=rows.positions.clone())

    def run() -> None:
        state = StepState(tokens, rows.positions.clone(), held.past.clone())
        own = [LayerCache(each.keys, each.values, each.past, state.past) for each in slots]
        step(state, buffers, rows, rotary, own, lambda name, layer: nullcontext(), greedy=True)

    return run


def layers_beyond_caches(config: ModelConfig, dtype: torch.dtype, device: torch.device = CPU) -> int:
    """As many layers as take twice the last-level cache, two at least (on a GPU eight), within the memory that is free.

    Where it would take more than LAYERS_AT_MOST the shape lives in the caches, as its model does, and a few will do.
    """
    shapes = config.layer_shapes().values()
    size = dtype.itemsize * sum(int(np.prod(shape)) for shape in shapes)
    on_gpu = device.type == "cuda"
    wanted = CACHES * (torch.cuda.get_device_properties(device).L2_cache_size if on_gpu else last_level_cache())
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else psutil.virtual_memory().available
    most = MEMORY_SHARE * free
    if 2 * size > most:
        raise UserError(
            f"two layers of {size / 1e9:.1f} GB, packed and unpacked, need more than {MEMORY_SHARE:.0%} each of the "
            f"{free / 1e9:.0f} GB that are free; use a smaller shape or dtype"
        )
    if LAYERS_AT_MOST * size < wanted:
        return LAYERS_OF_TINY
    return max(2, min(max(-(-wanted // size), ON_GPU_AT_LEAST if on_gpu else 2), int(most / size)))


def _unfused(multiply: Callable[[Tensor, Linear], Tensor], attention: Callable[..., Tensor]) -> Ops:
    return Ops(
        partial(unfused_qkv_gemm, multiply=multiply),
        attention,
        multiply,
        partial(unfused_mlp_gemm, multiply=multiply),
        unfused_residual_add,
    )


def _mixed(plain: LayerWeights, fused: LayerWeights, regions: Container[Stage], *, parallel: bool) -> LayerWeights:
    def of(region: Stage) -> LayerWeights:
        return fused if region in regions else plain

    return LayerWeights(
        qkv=of(Stage.QKV).qkv,
        attention=of(Stage.ATTENTION).attention,
        attn_out=of(Stage.ATTN_OUT).attn_out,
        attn_bias=of(Stage.RESIDUAL if parallel else Stage.MLP).attn_bias,
        mlp=of(Stage.MLP).mlp,
        mlp_out=of(Stage.ATTN_OUT).mlp_out,
        mlp_bias=of(Stage.RESIDUAL).mlp_bias,
        shared_norm=plain.shared_norm,
    )


def _taking(op: Callable[..., Any], dtype: torch.dtype, *, convert: bool) -> Callable[..., Any]:
    """`op` for rows of any floating type."""
    if not convert:
        return op
    return lambda *args, **kwargs: op(*(arg.to(dtype) if isinstance(arg, Tensor) else arg for arg in args), **kwargs)


def _sdpa(queries: Tensor, params: AttentionParams, heads: Heads, rows: Rows, cache: LayerCache) -> Tensor:
    """Attention of a decode step as torch's own fused op, the strongest baseline there is for it."""
    total = cache.past + rows.tokens
    q = queries.view(rows.batch, rows.tokens, heads.query, heads.dim).transpose(1, 2)
    k, v = (part[:, :, :total, : heads.dim] for part in (cache.keys, cache.values))
    context = F.scaled_dot_product_attention(q, k, v, scale=params.scale, enable_gqa=heads.query > heads.kv)
    return context.transpose(1, 2).reshape(len(queries), -1)


def _build(
    config: ModelConfig,
    dtype: torch.dtype,
    impl: str,
    layer: dict[str, Tensor],
    top: dict[str, Tensor],
    device: torch.device,
    quant: Quantization | None = None,
) -> ModelWeights:
    part, quant = shard(config), quant or Quantization()
    place = Arena.reserved(model_bytes(part, dtype, quant)) if impl == "cpp" else Heap(device)
    builder = Builder(part, dtype, impl, quant, place)
    layers = [builder.layer(index, layer, Norm()) for index in range(config.num_layers)]
    return builder.model(layers, builder.outside(top), Norm())


def _with_own_gemm(fused: LayerWeights, plain: LayerWeights) -> LayerWeights:
    """The fused layer with the gate and the up matrix one behind the other, as the unfused sequence expects them."""
    return replace(fused, mlp=replace(fused.mlp, up=packed(plain.mlp.up)))


def _draw(shapes: dict[str, tuple[int, ...]], generator: torch.Generator) -> dict[str, Tensor]:
    """Matrices that keep the size of their rows, norms around 1, small biases."""
    drawn = {}
    for name, shape in shapes.items():
        tensor = torch.randn(shape, generator=generator)
        if len(shape) == 2:
            drawn[name] = tensor.mul_(shape[1] ** -0.5)
        else:
            drawn[name] = tensor.mul_(0.1) if name.endswith(".bias") else tensor.mul_(0.1).add_(1)
    return drawn


def _filled_cache(
    config: ModelConfig,
    dtype: torch.dtype,
    batch: int,
    context: int,
    generator: torch.Generator,
    pool: SlotPool | None,
) -> tuple[KVCache, Rows]:
    cache = KVCache(config, dtype, context + 1, pool)
    cache.reserve(batch, context + 1)
    for tensor in (*cache.keys, *cache.values):
        filled = tensor[:, :, :context, : config.head_dim]
        filled.copy_(torch.randn(filled.shape, generator=generator))
    cache.length = cache.reach = context
    return cache, cache.place(batch, 1)


def _as_type(record: Record, dtype: torch.dtype) -> Record:
    """The record with every float32 tensor in `dtype`, deep down."""
    if isinstance(record, Tensor):
        return cast(Record, record.to(dtype)) if record.dtype == torch.float32 else record
    if not is_dataclass(record):
        return record
    assert not isinstance(record, type)
    changed = {each.name: _as_type(getattr(record, each.name), dtype) for each in fields(record)}
    return replace(record, **changed)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    return [tensor for part in value for tensor in _tensors(part)] if isinstance(value, list | tuple) else []


def _cycled(values: Sequence[Any], count: int) -> tuple[Any, ...]:
    return tuple(values[index % len(values)] for index in range(count))
