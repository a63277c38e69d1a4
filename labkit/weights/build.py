"""Canonical weights -> what the kernels read: packed once, tensor by tensor, into one piece of memory.

At no time is more than one weight held twice. Matrices keep the engine's dtype; norms, biases and position tables are
float32. With int8 the layers' matrices are quantised from the precision they come in, and the LM head if wanted; the
others are bfloat16.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import gcd

import torch
from torch import Tensor

from labkit.kernels.decode_step import LayerWeights, ModelWeights
from labkit.kernels.gemm import (
    cut_groups,
    group_size,
    interleave_gate,
    pack,
    pack_scales,
    packed,
    packed_shape,
    quantize,
)
from labkit.kernels.memory import Arena, return_freed_memory
from labkit.kernels.types import (
    AttentionParams,
    Heads,
    Linear,
    MlpWeights,
    Norm,
    QkvWeights,
    check_heads,
    float_dtype,
)
from labkit.models.config import ModelConfig
from labkit.models.policies import Policy
from labkit.models.shards import SUMMED, Cut, Shard, shard
from labkit.system.errors import UserError
from labkit.weights.checkpoint.saved import Canonical, Merged, Own, SavedWeights
from labkit.weights.protocol import TensorSource
from labkit.weights.quantise import Quantization

Keep = Callable[[int | None, Canonical], None]


class Builder:
    """Turns canonical tensors into weight records for one implementation."""

    def __init__(
        self,
        part: Shard,
        dtype: torch.dtype,
        impl: str,
        quant: Quantization,
        device: torch.device | None = None,
    ) -> None:
        self.part, self.config, self.impl, self.quant = part, part.local, impl, quant
        self.device = device or torch.device("cpu")
        self.quantised = dtype == torch.int8
        self.dtype = float_dtype(dtype)  # of the matrices that are not quantised
        self.arena = Arena(_capacity(part, dtype, quant)) if impl == "cpp" else None

    def linear(
        self, weight: Tensor | Linear, *, quantised: bool = False, columns: Cut | None = None, gated: bool = False
    ) -> Linear:
        """As the implementation reads it, on its device; biases are kept apart from matrices until `with_bias`.

        A `Linear` comes from a saved checkpoint: quantised there if at all, and packed unless its layout is "rows".
        `columns`: keep only these, after the scales of int8 were taken from whole rows. `gated`: gate, then up rows.
        """
        if isinstance(weight, Linear):
            return self._placed(weight, gated)
        if not quantised:
            weight = weight.to(self.device, self.dtype)
            if self.arena is None:
                weight = weight.contiguous() if self.device.type != "cpu" else weight.contiguous().clone()
            return self._placed(Linear(weight, None, weight.shape[0], weight.shape[1], "rows"), gated)
        group = group_size(weight.shape[1], self.quant.groups)
        ints, scales = quantize(weight.to(self.device), self.quant.groups)
        if columns is not None:
            ints, scales, group = _some_columns(columns, ints, scales, group)
        ints = ints if self.arena else ints.contiguous()
        return self._placed(Linear(ints, None, ints.shape[0], ints.shape[1], "rows", scales, group), gated)

    def _placed(self, linear: Linear, gated: bool) -> Linear:
        """The same matrix, packed if it is not yet: in the arena, or on the device."""
        if self.arena is None:
            weight, scales = (None if t is None else t.to(self.device) for t in (linear.weight, linear.scales))
            assert weight is not None
            linear = replace(linear, weight=weight, scales=scales)
            return packed(linear, self.impl) if linear.layout == "rows" else linear
        if linear.layout == "panels":
            return linear
        weight, scales = linear.weight, linear.scales
        if gated:
            weight, scales = interleave_gate(weight), None if scales is None else interleave_gate(scales)
        outputs, inputs = weight.shape
        panels = pack(weight, self.arena.empty(packed_shape(outputs, inputs, weight.dtype), weight.dtype))
        scales = None if scales is None else self.vector(pack_scales(scales))
        return replace(linear, weight=panels, outputs=outputs, layout="panels", scales=scales)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory for a weight that needs no packing."""
        return torch.empty(shape, dtype=dtype) if self.arena is None else self.arena.empty(shape, dtype)

    def with_bias(self, linear: Linear, bias: Tensor | None) -> Linear:
        if bias is None:
            return linear
        if linear.layout == "panels":
            bias = torch.nn.functional.pad(bias, (0, -len(bias) % 32))
        return replace(linear, bias=self.vector(bias))

    def norm(self, tensors: dict[str, Tensor], name: str) -> Norm:
        weight, bias = self.vector(tensors[f"{name}.weight"]), self.vector(tensors.get(f"{name}.bias"))
        return Norm(self.config.norm, weight, bias, self.config.norm_eps)

    def vector(self, tensor: Tensor | None) -> Tensor | None:
        """An own float32 copy, in the arena: small blocks that stay keep the heap from shrinking between layers."""
        if tensor is None:
            return None
        shape = tuple(tensor.shape)
        if self.arena is None:
            return torch.empty(shape, device=self.device).copy_(tensor)
        out = self.arena.empty(shape, torch.float32)
        return out.copy_(tensor)

    def layer(self, index: int, tensors: Canonical, norm_before: Norm) -> LayerWeights:
        """One layer. `norm_before`: what a post-norm layer's input goes through, the previous layer's last norm."""
        config, vectors = self.config, _tensors(tensors)
        norm1 = self.norm(vectors, "norm1")
        norm2 = norm1 if config.shared_norm else self.norm(vectors, "norm2")
        if not config.pre_norm:
            norm1, norm2 = norm_before, norm1
        matrix = partial(self.linear, quantised=self.quantised)
        up_bias = vectors.get("ff1.bias")
        if config.gated and self.impl == "cpp" and up_bias is not None:
            up_bias = interleave_gate(up_bias)
        slopes = self.vector(torch.tensor(self.part.alibi_slopes)) if config.position == "alibi" else None
        later = {
            name: replace(self.part, sums_whole=False).cut(name) if self.part.sums_whole else None for name in SUMMED
        }
        attn_bias, mlp_bias = vectors.get("attn_out.bias"), vectors.get("ff2.bias")
        if config.parallel_residual and self.part.size > 1:  # one sum of the ranks for both
            attn_bias, mlp_bias = None, _sum(attn_bias, mlp_bias)
        up = self.with_bias(matrix(tensors["ff1.weight"], gated=config.gated), up_bias)
        head_norms = {name: self.vector(vectors.get(f"{name}.weight")) for name in ("q_norm", "k_norm")}
        return LayerWeights(
            qkv=QkvWeights(
                norm1,
                self.with_bias(matrix(tensors["qkv.weight"]), vectors.get("qkv.bias")),
                **head_norms,
                qk_eps=config.norm_eps,
            ),
            attention=AttentionParams(config.attention_scales[index], config.windows[index], slopes, config.causal),
            attn_out=matrix(tensors["attn_out.weight"], columns=later["attn_out.weight"]),
            attn_bias=self.vector(attn_bias),
            mlp=MlpWeights(norm2, up, config.activation, config.gated),
            mlp_out=matrix(tensors["ff2.weight"], columns=later["ff2.weight"]),
            mlp_bias=self.vector(mlp_bias),
            shared_norm=config.shared_norm,
        )

    def top(self, tensors: Canonical) -> "TopWeights":
        """The matrices and norms outside the layers; of an encoder none, and a head without rows."""
        config, vectors = self.config, _tensors(tensors)
        if not config.causal:
            layout = "panels" if self.impl == "cpp" else "rows"
            no_head = Linear(torch.empty(0, config.hidden_size), None, 0, config.hidden_size, layout)
            return TopWeights(None, Norm(), None, None, None, None, no_head)
        head_weight = tensors["embed.weight" if config.tied_head else "head.weight"]
        head = self.linear(head_weight, quantised=self.quantised and self.quant.lm_head)
        project_in, project_out = (
            self.linear(tensors[f"{name}.weight"]) if f"{name}.weight" in tensors else None
            for name in ("project_in", "project_out")
        )
        if config.tied_head:
            embedding = None if self.impl != "reference" else head.floats() if head.scales is not None else head.weight
        else:
            rows = tensors["embed.weight"]
            saved = isinstance(rows, Linear)
            embedding = (rows.weight if isinstance(rows, Linear) else rows).to(self.device, self.dtype).contiguous()
            embedding = embedding if saved else embedding.clone()
        return TopWeights(
            embedding=embedding,
            embedding_norm=self.norm(vectors, "embed_norm") if config.embedding_norm else Norm(),
            project_in=project_in,
            positions=self.vector(vectors.get("positions.weight")),
            final_norm=self.norm(vectors, "final_norm") if config.final_norm else None,
            project_out=project_out,
            head=self.with_bias(head, vectors.get("head.bias")),
        )

    def model(self, layers: list[LayerWeights], top: "TopWeights", last_norm: Norm) -> ModelWeights:
        """All together. `last_norm`: what a post-norm model's output goes through in place of a final norm."""
        config = self.config
        return ModelWeights(
            layers=tuple(layers),
            heads=Heads(config.num_heads, config.num_kv_heads, config.head_dim),
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            embedding=top.embedding,
            embedding_size=config.embedding_size,
            embedding_norm=top.embedding_norm,
            project_in=top.project_in,
            positions=top.positions,
            position_offset=config.position_offset,
            final_norm=top.final_norm or last_norm,
            project_out=top.project_out,
            head=top.head,
            vocab=self.part.vocab,
            vocab_size=config.vocab_size,
            parallel_residual=config.parallel_residual,
            residual_from_norm=config.residual_from_norm or not config.pre_norm,
        )


def _matrices(layer: LayerWeights) -> Canonical:
    return {
        "qkv.weight": layer.qkv.proj,
        "attn_out.weight": layer.attn_out,
        "ff1.weight": layer.mlp.up,
        "ff2.weight": layer.mlp_out,
    }


@dataclass(frozen=True)
class TopWeights:
    """What a model has outside its layers; see ModelWeights."""

    embedding: Tensor | None
    embedding_norm: Norm
    project_in: Linear | None
    positions: Tensor | None
    final_norm: Norm | None
    project_out: Linear | None
    head: Linear

    def matrices(self, tied: bool) -> Canonical:
        """By canonical name, as they are packed; an embedding of its own is rows."""
        found = {"project_in.weight": self.project_in, "project_out.weight": self.project_out}
        if tied:
            found["embed.weight"] = self.head
        else:
            assert self.embedding is not None
            found["head.weight"] = self.head
            outputs, inputs = self.embedding.shape
            found["embed.weight"] = Linear(self.embedding, None, outputs, inputs, "rows")
        return {name: linear for name, linear in found.items() if linear is not None}


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
    saved = saved_in(source)
    part = replace(part or shard(config), sums_whole=dtype == torch.int8 and (saved is None or saved.dtype != dtype))
    check_names(policy, config, source, impl)
    builder = Builder(part, dtype, impl, quant, device)
    canonical: Own | Merged | Unsaved = (
        saved.part(part, dtype, impl, builder.empty) if saved else Unsaved(policy, source, part, dtype)
    )
    tensors = canonical.top()
    top = builder.top(tensors)  # the largest matrices first, while nothing else is in memory
    if keep:
        keep(None, {**tensors, **top.matrices(config.tied_head)})
    layers: list[LayerWeights] = []
    before = Norm()
    for index in range(config.num_layers):
        tensors = canonical.layer(index)
        layers.append(builder.layer(index, tensors, before))
        if not config.pre_norm:
            before = builder.norm(_tensors(tensors), "norm2")
        if keep:
            keep(index, {**tensors, **_matrices(layers[-1])})
        del tensors
        return_freed_memory()
        if done_with:
            done_with(index)
        if progress:
            progress(index + 1, config.num_layers)
    return builder.model(layers, top, before)


class Unsaved:
    """The canonical weights that a rank holds, made of a source's Hugging Face tensors."""

    def __init__(self, policy: Policy, source: TensorSource, part: Shard, dtype: torch.dtype) -> None:
        self._policy, self._source, self._part, self._dtype = policy, source, part, dtype

    def top(self) -> Canonical:
        return self._policy.top_tensors(self._part, self._get)

    def layer(self, index: int) -> Canonical:
        return self._policy.layer_tensors(self._part, index, self._get)

    def _get(self, name: str, cut: Cut | None) -> Tensor:
        tensor = self._source.get(name, None if self._dtype == torch.int8 else self._dtype, cut)
        check_finite(name, tensor)
        return tensor


def saved_in(source: TensorSource) -> SavedWeights | None:
    """The checkpoint of labkit's that a source is, which holds canonical weights; None: it is none."""
    weights = getattr(source, "weights", source)
    return weights if isinstance(weights, SavedWeights) else None


def check_names(policy: Policy, config: ModelConfig, source: TensorSource, impl: str) -> None:
    """Raises ValueError for tensors that are missing or extra, and for a size that the kernels don't take."""
    check_heads(Heads(config.num_heads, config.num_kv_heads, config.head_dim), impl)
    policy.check(config, source.names())


def check_weights(policy: Policy, config: ModelConfig, source: TensorSource, impl: str) -> None:
    """Raises every ValueError that `build_weights` would, without building anything."""
    check_names(policy, config, source, impl)
    for name in sorted(policy.expected(config)):
        check_finite(name, source.get(name))

    def get(name: str, cut: Cut | None) -> Tensor:
        return source.get(name, None, cut)

    whole = shard(config)
    policy.top_tensors(whole, get)
    for index in range(config.num_layers):
        policy.layer_tensors(whole, index, get)


def check_finite(name: str, tensor: Tensor) -> None:
    """Raises ValueError if the tensor holds a NaN or an infinity."""
    low, high = torch.aminmax(tensor)
    if not (torch.isfinite(low) and torch.isfinite(high)):
        raise UserError(f"{name} holds values that are not finite (NaN or infinity); the checkpoint is damaged")


def _tensors(canonical: Canonical) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in canonical.items() if isinstance(tensor, Tensor)}


def _sum(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    return (
        first.float() + second.float()
        if first is not None and second is not None
        else second
        if first is None
        else first
    )


def _some_columns(columns: Cut, ints: Tensor, scales: Tensor, group: int) -> tuple[Tensor, Tensor, int]:
    """These columns of a quantised matrix, with the scales that they have in it: (int8, scales, group).

    Where they begin within a group, the groups become as small as it takes for each to have one scale.
    """
    (begin, end), *more = columns.ranges
    assert not more
    starts, size = cut_groups(begin, end, group, scales.shape[1])
    return ints[:, begin:end], scales[:, [at // group for at in starts]], size


def _capacity(part: Shard, dtype: torch.dtype, quant: Quantization) -> int:
    """Bytes of all packed matrices, their scales and float32 vectors, padding included; a tied head is packed once."""
    local = replace(part, sums_whole=False)
    outside = dict(local.top_shapes)
    positions = outside.pop("positions.weight", (0, 0))
    total = 4 * positions[0] * positions[1] + 64
    quantised = [*local.layer_shapes.values()] * part.config.num_layers
    kept = [*outside.values()]
    if quant.lm_head:
        quantised, kept = quantised + kept, []
    for shapes, stored in ((quantised, dtype), (kept, float_dtype(dtype))):
        for shape in shapes:
            if len(shape) == 1:
                total += 4 * shape[0] + 256
            else:
                total += torch.Size(packed_shape(shape[0] + 32, shape[1], stored)).numel() * stored.itemsize + 64
                total += 4 * (shape[0] + 32) * (quant.groups + 1)
    if part.size > 1 and quant.groups > 1:  # groups that a cut makes smaller
        for name in SUMMED:
            cut, (outputs, inputs) = local.cut(name), local.layer_shapes[name]
            assert cut is not None
            size = gcd(group_size(cut.whole, quant.groups), cut.ranges[0][0])
            total += part.config.num_layers * 4 * (outputs + 32) * (inputs // size + 1)
    return total
