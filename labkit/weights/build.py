"""Builds a rank's part of a model tensor by tensor, with at most one weight in memory twice at any time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from labkit.kernels.decode_step import LayerWeights, ModelWeights
from labkit.kernels.gpu import CPU
from labkit.kernels.memory import Arena, Heap, reserved, return_freed_memory
from labkit.kernels.types import Heads, Norm, check_heads
from labkit.models.config import CHOICE_BIAS
from labkit.models.shards import Cut, shard
from labkit.system.errors import UserError
from labkit.system.progress import progress_bar
from labkit.system.terminal import terminal
from labkit.weights.canonical import Canonical, CanonicalLayers, Empty, RowBlocks, Weight, is_matrix, vectors_of
from labkit.weights.capacity import layer_bytes, model_bytes, outside_bytes
from labkit.weights.checkpoint.saved import SavedWeights
from labkit.weights.gguf.tensors import GgufTensors, NativeWeights
from labkit.weights.packing import packed_at_once
from labkit.weights.protocol import TensorSource, finite, is_finite
from labkit.weights.quantise import check_schemes, warn_of_coarse_scales
from labkit.weights.records import Builder
from labkit.weights.spec import WeightSpec

Keep = Callable[[int | None, Canonical], None]
PackedLayers = Callable[[int], None]  # called with the number of packed layers, 0 after the weights outside of them
WORTH_A_BAR = 512 << 20  # bytes
MEGABYTE = 10**6


@contextmanager
def packing_shown(spec: WeightSpec) -> Iterator[PackedLayers | None]:
    """Yields a function that shows the packed megabytes as a bar on stderr; None for a small model, and on all ranks
    but the first.
    """
    outside, total, layers = outside_bytes(spec), model_bytes(spec), len(spec.part.layers)
    if spec.part.rank or total < WORTH_A_BAR:
        yield None
        return
    with progress_bar(terminal(stderr=True)) as follow:
        follow(0, total // MEGABYTE, "MB packed")
        yield lambda packed: follow(
            (outside + packed * (total - outside) // layers) // MEGABYTE, total // MEGABYTE, "MB packed"
        )


def build_weights(
    spec: WeightSpec,
    source: TensorSource,
    device: torch.device = CPU,
    progress: PackedLayers | None = None,
    done_with: Callable[[int], None] | None = None,
    keep: Keep | None = None,
) -> ModelWeights:
    """Reads this rank's part of every tensor of `source` once.

    `progress(packed)` and `done_with(layer)` are called after each layer. `keep(layer, weights)` is called with
    each layer's packed weights, and with layer None for the weights outside the layers.

    Raises ValueError for missing, extra, misshapen or non-finite tensors and for sizes that the kernels don't support.
    """
    spec, canonical = canonical_layers(check_names(spec, source), source)
    size = model_bytes(spec)
    room = max(size, model_bytes(spec.unquantised))  # a file's codes are no larger than floats
    place = Arena.reserved(room) if spec.impl == "cpp" else Heap(device)
    builder = Builder(spec, place, packed_at_once(size))
    return build_layers(canonical, builder, progress, done_with, keep)


def build_layers(
    canonical: CanonicalLayers,
    builder: Builder,
    progress: PackedLayers | None = None,
    done_with: Callable[[int], None] | None = None,
    keep: Keep | None = None,
) -> ModelWeights:
    """Builds a rank's weights layer by layer, in the builder's memory. For the callbacks see `build_weights`."""
    part = builder.spec.part
    tensors = canonical.top(builder.empty)
    outside = builder.outside(tensors)  # the largest matrices first, while nothing else is in memory
    warn_of_coarse_scales(None, outside.matrices())
    if keep:
        keep(None, {**vectors_of(tensors), **outside.matrices()})
    if progress:
        progress(0)
    layers: list[LayerWeights] = []
    before = _norm_before(part.layers.start, canonical, builder)
    for index in part.layers:
        tensors = canonical.layer(index, builder.empty)
        layers.append(builder.layer(index, tensors, before))
        warn_of_coarse_scales(index, layers[-1].matrices)
        before = builder.last_norm(tensors)
        if keep:
            keep(index, {**vectors_of(tensors), **layers[-1].matrices})
        del tensors
        return_freed_memory()
        if done_with:
            done_with(index)
        if progress:
            progress(len(layers))
    return builder.model(layers, outside, before)


def pack_layers(spec: WeightSpec, source: TensorSource, keep: Keep, progress: PackedLayers | None = None) -> None:
    """Packs the weights of `build_weights` on the CPU as the spec's kernels read them, and passes them to `keep`.
    All layers use the same memory one after the other, so a model may be larger than memory.
    """
    spec, canonical = canonical_layers(check_names(spec, source), source)
    types = (spec, spec.unquantised)  # a file's codes are no larger than floats
    sizes = [max(map(size, types)) for size in (outside_bytes, layer_bytes)]
    builder = Builder(spec, Arena.reserved(sizes[0]), packed_at_once(sum(sizes)))
    tensors = canonical.top(builder.empty)
    outside = builder.outside(tensors).matrices()
    warn_of_coarse_scales(None, outside)
    keep(None, {**vectors_of(tensors), **outside})
    memory = reserved(sizes[1])
    for count, index in enumerate(spec.part.layers, 1):
        builder = replace(builder, place=Arena(memory))
        tensors = canonical.layer(index, builder.empty)
        matrices = builder.layer(index, tensors, Norm()).matrices
        warn_of_coarse_scales(index, matrices)
        keep(index, {**vectors_of(tensors), **matrices})
        del tensors
        return_freed_memory()
        if progress:
            progress(count)


def _norm_before(index: int, canonical: CanonicalLayers, builder: Builder) -> Norm:
    """The norm of the input of layer `index` in a post-norm model: the last norm of the layer before. The other weights
    of that layer are dropped.
    """
    if index == 0 or builder.config.pre_norm:
        return Norm()
    return builder.last_norm(canonical.layer(index - 1, Heap(CPU).empty))


def canonical_layers(spec: WeightSpec, source: TensorSource) -> tuple[WeightSpec, CanonicalLayers]:
    """A rank's canonical weights: packed, in codes, or still to be quantised. The part of the returned spec says
    whether sums are cut yet.
    """
    weights, quant = getattr(source, "weights", source), spec.quant
    if quant.as_stored and not has_codes(source):
        raise UserError("quant.as_stored keeps the codes of a GGUF file, but these weights are no codes; leave it out")
    if isinstance(weights, GgufTensors) and quant.as_stored:
        return spec, NativeWeights(weights, spec.part)
    saved = saved_in(source)
    if saved is not None and (quant.as_stored or not saved.native):
        spec = replace(spec, part=replace(spec.part, sums_whole=spec.quantised and saved.dtype != spec.dtype))
        return spec, saved.part(spec)
    spec = replace(spec, part=replace(spec.part, sums_whole=spec.quantised))
    if spec.quantised:
        check_schemes(spec.part, quant)
    return spec, saved.floats(spec) if saved else Unsaved(spec, source)


class Unsaved(CanonicalLayers):
    """A rank's canonical weights, made of a source's Hugging Face tensors."""

    def __init__(self, spec: WeightSpec, source: TensorSource) -> None:
        super().__init__(spec.part)
        self._policy, self._source, self._dtype = spec.policy, source, spec.dtype

    def load(self, name: str, index: int | None, empty: Empty) -> Weight:
        if name in ("embed.weight", "head.weight"):
            return self._by_token(name)
        if name == CHOICE_BIAS:  # rounded, it would choose other experts
            return self._policy.tensor(self.part, name, index, self._get_exact)
        if index is None or not is_matrix(name):
            return self._policy.tensor(self.part, name, index, self._get)
        return RowBlocks.joined(self._policy.pieces(self.part, name, index, self._get_narrow))

    def _by_token(self, name: str) -> RowBlocks:
        """A matrix with a row for each token of the vocabulary."""
        stored, vocab, whole = self._policy.stored_names(name)[0], self.part.vocab, self.part.config.vocab_size
        outputs, inputs = self.part.top_shapes[name]

        def rows(begin: int, end: int) -> Tensor:
            tensor = self._get_narrow(stored, Cut(0, ((vocab.start + begin, vocab.start + end),), whole))
            if tensor.shape[1:] != (inputs,):
                raise UserError(
                    f"{stored} has rows of shape {list(tensor.shape[1:])}, expected [{inputs}]; check that the "
                    "weights and the config belong together"
                )
            return tensor

        return RowBlocks((outputs, inputs), rows)

    def _get(self, name: str, cut: Cut | None) -> Tensor:
        return finite_tensor(self._source, name, self._dtype, cut)

    def _get_exact(self, name: str, cut: Cut | None) -> Tensor:
        return finite_tensor(self._source, name, torch.float32, cut)

    def _get_narrow(self, name: str, cut: Cut | None) -> Tensor:
        """A matrix, or rows of one; in its stored type where `dtype` has all of its numbers and the source would copy
        it: the packer widens some rows at a time.
        """
        if getattr(getattr(self._source, "weights", self._source), "copies_to_convert", False):
            stored = self._source.get(name, None, cut)
            if torch.promote_types(stored.dtype, self._dtype) == self._dtype:
                return finite(stored, name)
        return self._get(name, cut)


def saved_in(source: TensorSource) -> SavedWeights | None:
    """The source's weights if they are a checkpoint of labkit's own, with canonical weights; else None."""
    weights = getattr(source, "weights", source)
    return weights if isinstance(weights, SavedWeights) else None


def has_codes(source: TensorSource) -> bool:
    """Whether the weights are stored as codes, in a GGUF file or in a packed checkpoint made of one."""
    weights = getattr(source, "weights", source)
    if isinstance(weights, GgufTensors):
        return weights.quantised
    return isinstance(weights, SavedWeights) and weights.native


def check_names(spec: WeightSpec, source: TensorSource) -> WeightSpec:
    """The spec with the names of the source. Raises ValueError for missing or extra tensors, and for a size that the
    kernels don't support.
    """
    config = spec.config
    check_heads(Heads(config.num_heads, config.num_kv_heads, config.head_dim), spec.impl)
    names = source.names()
    spec.policy.check(config, names)
    return replace(spec, policy=spec.policy.as_stored(config, names))


def check_weights(spec: WeightSpec, source: TensorSource) -> None:
    """Raises every ValueError of `build_weights`, without building anything."""
    spec = check_names(spec, source)
    policy, config = spec.policy, spec.config
    for name in sorted(policy.expected(config)):
        finite_tensor(source, name, spec.dtype)

    def get(name: str, cut: Cut | None) -> Tensor:
        return source.get(name, None, cut)

    whole = shard(config)
    policy.top_tensors(whole, get)
    for index in range(config.num_layers):
        policy.layer_tensors(whole, index, get)


def finite_tensor(source: TensorSource, name: str, dtype: torch.dtype, cut: Cut | None = None) -> Tensor:
    """The tensor, or the cut's part of it, in `dtype`; for int8 in its stored type. Raises ValueError if it holds a
    NaN, an infinity, or a number out of the type's range.
    """
    tensor = source.get(name, None if dtype == torch.int8 else dtype, cut)
    if not is_finite(tensor):
        finite(source.get(name, None, cut), name)
        raise UserError(
            f"{name} holds numbers beyond {torch.finfo(dtype).max:g}, the largest of {dtype}; use dtype=torch.bfloat16 "
            "or torch.float32"
        )
    return tensor
