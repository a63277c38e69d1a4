"""Everything that a rank holds of a model, built tensor by tensor: at no time is more than one weight held twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from labkit.kernels.decode_step import LayerWeights, ModelWeights
from labkit.kernels.memory import Arena, Heap, reserved, return_freed_memory
from labkit.kernels.types import Heads, Norm, check_heads, float_dtype
from labkit.models.config import ModelConfig
from labkit.models.policies import Policy
from labkit.models.shards import Cut, Shard, shard
from labkit.system.errors import UserError
from labkit.weights.canonical import Canonical, Loading, RowBlocks, Weight, vectors_of
from labkit.weights.capacity import layer_bytes, model_bytes, outside_bytes
from labkit.weights.checkpoint.saved import SavedWeights
from labkit.weights.checkpoint.shard_file import Empty
from labkit.weights.gguf.native import NativeWeights
from labkit.weights.gguf.tensors import GgufTensors
from labkit.weights.protocol import TensorSource, finite, is_finite
from labkit.weights.quantise import Quantization, check_schemes, warn_of_coarse_scales
from labkit.weights.records import Builder, matrices_of, packed_at_once

Keep = Callable[[int | None, Canonical], None]


def build_weights(
    policy: Policy,
    config: ModelConfig,
    source: TensorSource,
    dtype: torch.dtype,
    impl: str,
    quant: Quantization,
    progress: Callable[[int, int], None] | None = None,
    done_with: Callable[[int], None] | None = None,
    device: torch.device | None = None,
    part: Shard | None = None,
    keep: Keep | None = None,
) -> ModelWeights:
    """Reads every tensor of `source` once, or the `part` of each that this rank holds; `quant` counts with int8 only.

    `progress(done, total)` and `done_with(layer)` are called after each layer, `keep(layer, weights)` with what a layer
    is made of, packed, and with layer None for what is outside the layers.

    Raises ValueError for missing, extra, misshapen or non-finite tensors and for sizes that the kernels don't take.
    """
    check_names(policy, config, source, impl)
    part, canonical = canonical_layers(policy, source, dtype, impl, quant, part or shard(config))
    size = model_bytes(part, dtype, quant)
    room = max(size, model_bytes(part, float_dtype(dtype), quant))  # codes of a file are no larger
    place = Arena.reserved(room) if impl == "cpp" else Heap(device or torch.device("cpu"))
    builder = Builder(part, dtype, impl, quant, place, packed_at_once(size))
    return build_layers(config, canonical, builder, progress, done_with, keep)


def build_layers(
    config: ModelConfig,
    canonical: CanonicalLayers,
    builder: Builder,
    progress: Callable[[int, int], None] | None = None,
    done_with: Callable[[int], None] | None = None,
    keep: Keep | None = None,
) -> ModelWeights:
    """The weights that a rank holds, layer by layer, where the builder puts them. For the calls see `build_weights`."""
    part = builder.part
    tensors = canonical.top(builder.empty)
    outside = builder.outside(tensors)  # the largest matrices first, while nothing else is in memory
    warn_of_coarse_scales(None, outside.matrices())
    if keep:
        keep(None, {**vectors_of(tensors), **outside.matrices()})
    layers: list[LayerWeights] = []
    before = _norm_before(part.layers.start, config, canonical, builder)
    for index in part.layers:
        tensors = canonical.layer(index, builder.empty)
        layers.append(builder.layer(index, tensors, before))
        warn_of_coarse_scales(index, matrices_of(layers[-1]))
        before = builder.last_norm(tensors)
        if keep:
            keep(index, {**vectors_of(tensors), **matrices_of(layers[-1])})
        del tensors
        return_freed_memory()
        if done_with:
            done_with(index)
        if progress:
            progress(len(layers), len(part.layers))
    return builder.model(layers, outside, before)


def pack_layers(
    policy: Policy,
    config: ModelConfig,
    source: TensorSource,
    dtype: torch.dtype,
    impl: str,
    quant: Quantization,
    part: Shard,
    keep: Keep,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Packs the weights of `build_weights` on the CPU as the kernels of `impl` read them, and gives them to `keep`, one
    layer after the other in the same memory: so a model may be larger than memory.
    """
    check_names(policy, config, source, impl)
    part, canonical = canonical_layers(policy, source, dtype, impl, quant, part)
    types = (dtype, float_dtype(dtype))  # codes of a file are no larger than floats
    sizes = [max(size(part, each, quant) for each in types) for size in (outside_bytes, layer_bytes)]
    builder = Builder(part, dtype, impl, quant, Arena.reserved(sizes[0]), packed_at_once(sum(sizes)))
    tensors = canonical.top(builder.empty)
    outside = builder.outside(tensors).matrices()
    warn_of_coarse_scales(None, outside)
    keep(None, {**vectors_of(tensors), **outside})
    memory = reserved(sizes[1])
    for count, index in enumerate(part.layers, 1):
        builder = replace(builder, place=Arena(memory))
        tensors = canonical.layer(index, builder.empty)
        matrices = matrices_of(builder.layer(index, tensors, Norm()))
        warn_of_coarse_scales(index, matrices)
        keep(index, {**vectors_of(tensors), **matrices})
        del tensors
        return_freed_memory()
        if progress:
            progress(count, len(part.layers))


def _norm_before(index: int, config: ModelConfig, canonical: CanonicalLayers, builder: Builder) -> Norm:
    """What the input of layer `index` goes through where layers normalise their outputs: the norm of the layer before,
    of which nothing else is kept.
    """
    if index == 0 or config.pre_norm:
        return Norm()
    return builder.last_norm(canonical.layer(index - 1, Heap(torch.device("cpu")).empty))


def canonical_layers(
    policy: Policy, source: TensorSource, dtype: torch.dtype, impl: str, quant: Quantization, part: Shard
) -> tuple[Shard, CanonicalLayers]:
    """What a rank holds, and its canonical weights: packed, in codes, or to be quantised."""
    saved, gguf = saved_in(source), gguf_in(source)
    if quant.as_stored and not has_codes(source):
        raise UserError("quant.as_stored keeps the codes of a GGUF file, and these weights are no codes; leave it out")
    if gguf is not None and quant.as_stored:
        return part, NativeWeights(policy, gguf, part)
    if saved is not None and (quant.as_stored or not saved.native):
        part = replace(part, sums_whole=dtype == torch.int8 and saved.dtype != dtype)
        return part, saved.part(part, dtype, impl)
    part = replace(part, sums_whole=dtype == torch.int8)
    if dtype == torch.int8:
        check_schemes(part, quant)
    return part, saved.floats(part, dtype) if saved else Unsaved(policy, source, part, dtype)


class CanonicalLayers(Protocol):
    """The canonical weights that a rank holds; those that are packed in a file are read into memory from `empty`."""

    def top(self, empty: Empty) -> Canonical: ...

    def layer(self, index: int, empty: Empty) -> Canonical: ...


class Unsaved:
    """The canonical weights that a rank holds, made of a source's Hugging Face tensors."""

    def __init__(self, policy: Policy, source: TensorSource, part: Shard, dtype: torch.dtype) -> None:
        self._policy, self._source, self._part, self._dtype = policy, source, part, dtype

    def top(self, empty: Empty) -> Canonical:
        return Loading(self._part.top_shapes, self._outside)

    def layer(self, index: int, empty: Empty) -> Canonical:
        return Loading(self._part.layer_shapes, lambda name: self._policy.tensor(self._part, name, index, self._get))

    def _outside(self, name: str) -> Weight:
        if name not in ("embed.weight", "head.weight"):
            return self._policy.tensor(self._part, name, None, self._get)
        stored, vocab, whole = self._policy.stored_names(name)[0], self._part.vocab, self._part.config.vocab_size

        outputs, inputs = self._part.top_shapes[name]

        def rows(begin: int, end: int) -> Tensor:
            tensor = self._get(stored, Cut(0, ((vocab.start + begin, vocab.start + end),), whole))
            if tensor.shape[1:] != (inputs,):
                raise UserError(
                    f"{stored} has rows of shape {list(tensor.shape[1:])}, expected [{inputs}]; check that the "
                    "checkpoint and its config.json belong together"
                )
            return tensor

        return RowBlocks((outputs, inputs), rows)

    def _get(self, name: str, cut: Cut | None) -> Tensor:
        return finite_tensor(self._source, name, self._dtype, cut)


def saved_in(source: TensorSource) -> SavedWeights | None:
    """The checkpoint of labkit's that a source is, which holds canonical weights; None: it is none."""
    weights = getattr(source, "weights", source)
    return weights if isinstance(weights, SavedWeights) else None


def gguf_in(source: TensorSource) -> GgufTensors | None:
    """The GGUF file that a source is; None: it is none."""
    weights = getattr(source, "weights", source)
    return weights if isinstance(weights, GgufTensors) else None


def has_codes(source: TensorSource) -> bool:
    """Whether the weights are codes already: of a GGUF file, or of the packed checkpoint that was made of one."""
    saved, gguf = saved_in(source), gguf_in(source)
    return gguf.quantised if gguf is not None else saved is not None and saved.native


def check_names(policy: Policy, config: ModelConfig, source: TensorSource, impl: str) -> None:
    """Raises ValueError for tensors that are missing or extra, and for a size that the kernels don't take."""
    check_heads(Heads(config.num_heads, config.num_kv_heads, config.head_dim), impl)
    policy.check(config, source.names())


def check_weights(policy: Policy, config: ModelConfig, source: TensorSource, dtype: torch.dtype, impl: str) -> None:
    """Raises every ValueError that `build_weights` would, without building anything."""
    check_names(policy, config, source, impl)
    for name in sorted(policy.expected(config)):
        finite_tensor(source, name, dtype)

    def get(name: str, cut: Cut | None) -> Tensor:
        return source.get(name, None, cut)

    whole = shard(config)
    policy.top_tensors(whole, get)
    for index in range(config.num_layers):
        policy.layer_tensors(whole, index, get)


def finite_tensor(source: TensorSource, name: str, dtype: torch.dtype, cut: Cut | None = None) -> Tensor:
    """The tensor, or the part that the cut takes, as weights of `dtype` are made of it: in that type, or as it is for
    int8. Raises ValueError if it holds a NaN or an infinity, or a number that the type has no room for.
    """
    tensor = source.get(name, None if dtype == torch.int8 else dtype, cut)
    if not is_finite(tensor):
        finite(source.get(name, None, cut), name)
        raise UserError(
            f"{name} holds numbers beyond {torch.finfo(dtype).max:g}, the largest of {dtype}; use dtype=torch.bfloat16 "
            "or torch.float32"
        )
    return tensor
