"""Canonical weights -> what the kernels read: packed once, tensor by tensor, into one piece of memory.

At no time is more than one weight held twice. Matrices keep the engine's dtype; norms, biases and position tables are
float32. With int8 the layers' matrices are quantised from the precision they come in, and the LM head if wanted; the
others are bfloat16.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import Protocol

import torch
from torch import Tensor

from labkit.config import ModelConfig
from labkit.engine.options import Quantization
from labkit.kernels.decode_step import LayerWeights, ModelWeights
from labkit.kernels.gemm import group_size, interleave_gate, pack, pack_scales, packed, packed_shape, quantize
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
from labkit.policies import Policy
from labkit.shards import SUMMED, Cut, Shard, shard


class TensorSource(Protocol):
    """Where tensors come from, by their Hugging Face names: a model, a checkpoint, or a seeded generator."""

    def names(self) -> set[str]: ...

    def get(self, name: str, dtype: torch.dtype | None = None, cut: Cut | None = None) -> Tensor: ...


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

    def linear(self, weight: Tensor, *, quantised: bool = False, columns: Cut | None = None) -> Linear:
        """As the implementation reads it, on its device; biases are kept apart from matrices until `with_bias`.

        `columns`: keep only these, after the scales of int8 were taken from whole rows.
        """
        weight = weight.to(self.device)
        scales, group = None, 0
        if quantised:
            group = group_size(weight.shape[1], self.quant.groups)
            weight, scales = quantize(weight, self.quant.groups)
            if columns is not None:
                weight, scales, group = _some_columns(columns, weight, scales, group)
        else:
            weight = weight.to(self.dtype)
        outputs, inputs = weight.shape
        if self.arena is None:
            own = weight.contiguous() if quantised or self.device.type != "cpu" else weight.contiguous().clone()
            return packed(Linear(own, None, outputs, inputs, "rows", scales, group), self.impl)
        panels = pack(weight, self.arena.empty(packed_shape(outputs, inputs, weight.dtype), weight.dtype))
        if scales is not None:
            scales = self.vector(pack_scales(scales))
        return Linear(panels, None, outputs, inputs, "panels", scales, group)

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

    def layer(self, index: int, tensors: dict[str, Tensor], norm_before: Norm) -> LayerWeights:
        """One layer. `norm_before`: what a post-norm layer's input goes through, the previous layer's last norm."""
        config = self.config
        norm1 = self.norm(tensors, "norm1")
        norm2 = norm1 if config.shared_norm else self.norm(tensors, "norm2")
        if not config.pre_norm:
            norm1, norm2 = norm_before, norm1
        matrix = partial(self.linear, quantised=self.quantised)
        up, up_bias = tensors["ff1.weight"], tensors.get("ff1.bias")
        if config.gated and self.impl == "cpp":
            up = interleave_gate(up)
            up_bias = None if up_bias is None else interleave_gate(up_bias)
        slopes = self.vector(torch.tensor(self.part.alibi_slopes)) if config.position == "alibi" else None
        later = {name: replace(self.part, sums_whole=False).cut(name) if self.quantised else None for name in SUMMED}
        attn_bias, mlp_bias = tensors.get("attn_out.bias"), tensors.get("ff2.bias")
        if config.parallel_residual and self.part.size > 1:  # one sum of the ranks for both
            attn_bias, mlp_bias = None, _sum(attn_bias, mlp_bias)
        head_norms = {name: self.vector(tensors.get(f"{name}.weight")) for name in ("q_norm", "k_norm")}
        return LayerWeights(
            qkv=QkvWeights(
                norm1,
                self.with_bias(matrix(tensors["qkv.weight"]), tensors.get("qkv.bias")),
                **head_norms,
                qk_eps=config.norm_eps,
            ),
            attention=AttentionParams(config.attention_scales[index], config.windows[index], slopes, config.causal),
            attn_out=matrix(tensors["attn_out.weight"], columns=later["attn_out.weight"]),
            attn_bias=self.vector(attn_bias),
            mlp=MlpWeights(norm2, self.with_bias(matrix(up), up_bias), config.activation, config.gated),
            mlp_out=matrix(tensors["ff2.weight"], columns=later["ff2.weight"]),
            mlp_bias=self.vector(mlp_bias),
            shared_norm=config.shared_norm,
        )

    def top(self, tensors: dict[str, Tensor]) -> "TopWeights":
        """The matrices and norms outside the layers; of an encoder none, and a head without rows."""
        config = self.config
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
            embedding = tensors["embed.weight"].to(self.device, self.dtype).contiguous().clone()
        return TopWeights(
            embedding=embedding,
            embedding_norm=self.norm(tensors, "embed_norm") if config.embedding_norm else Norm(),
            project_in=project_in,
            positions=self.vector(tensors.get("positions.weight")),
            final_norm=self.norm(tensors, "final_norm") if config.final_norm else None,
            project_out=project_out,
            head=self.with_bias(head, tensors.get("head.bias")),
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
) -> ModelWeights:
    """Reads every tensor of `source` once, or the `part` of each that this rank holds; `quant` counts with int8 only.

    `progress(done, total)` and `done_with(layer)` are called after each layer.

    Raises ValueError for missing, extra, misshapen or non-finite tensors and for sizes that the kernels don't take.
    """
    part = replace(part or shard(config), sums_whole=dtype == torch.int8)
    check_names(policy, config, source, impl)
    builder = Builder(part, dtype, impl, quant, device)

    def get(name: str, cut: Cut | None) -> Tensor:
        tensor = source.get(name, None if dtype == torch.int8 else dtype, cut)
        check_finite(name, tensor)
        return tensor

    top = builder.top(policy.top_tensors(part, get))  # the largest matrices first, while nothing else is in memory
    layers: list[LayerWeights] = []
    before = Norm()
    for index in range(config.num_layers):
        tensors = policy.layer_tensors(part, index, get)
        layers.append(builder.layer(index, tensors, before))
        if not config.pre_norm:
            before = builder.norm(tensors, "norm2")
        del tensors
        return_freed_memory()
        if done_with:
            done_with(index)
        if progress:
            progress(index + 1, config.num_layers)
    return builder.model(layers, top, before)


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
        raise ValueError(f"{name} holds values that are not finite (NaN or infinity); the checkpoint is damaged")


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
    size = gcd(group, begin)
    if scales.shape[1] == 1:
        return ints[:, begin:end], scales, group_size(end - begin, 1)
    if size % 2:
        raise ValueError(
            f"groups of {group} inputs cannot be cut at input {begin}; use q_groups=1, or a tp_size that cuts elsewhere"
        )
    return ints[:, begin:end], scales[:, [at // group for at in range(begin, end, size)]], size


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
