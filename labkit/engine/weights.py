"""Canonical weights -> what the kernels read: packed once, tensor by tensor, into one piece of memory.

At no time is more than one weight held twice. Matrices keep the engine's dtype; norms, biases and position tables are
float32. With int8 the layers' matrices are quantised from the precision they come in, and the LM head if wanted; the
others are bfloat16.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from labkit.config import ModelConfig, alibi_slopes
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


class TensorSource(Protocol):
    """Where tensors come from, by their Hugging Face names: a model, a checkpoint, or a seeded generator."""

    def names(self) -> set[str]: ...

    def get(self, name: str, dtype: torch.dtype | None = None) -> Tensor: ...


class Builder:
    """Turns canonical tensors into weight records for one implementation."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        impl: str,
        quant: Quantization,
        device: torch.device | None = None,
    ) -> None:
        self.config, self.impl, self.quant = config, impl, quant
        self.device = device or torch.device("cpu")
        self.quantised = dtype == torch.int8
        self.dtype = float_dtype(dtype)  # of the matrices that are not quantised
        self.arena = Arena(_capacity(config, dtype, quant)) if impl == "cpp" else None

    def linear(self, weight: Tensor, *, quantised: bool = False) -> Linear:
        """As the implementation reads it, on its device; biases are kept apart from matrices until `with_bias`."""
        outputs, inputs = weight.shape
        weight = weight.to(self.device)
        scales, group = None, 0
        if quantised:
            group = group_size(inputs, self.quant.groups)
            weight, scales = quantize(weight, self.quant.groups)
        else:
            weight = weight.to(self.dtype)
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
        slopes = self.vector(torch.tensor(alibi_slopes(config.num_heads))) if config.position == "alibi" else None
        head_norms = {name: self.vector(tensors.get(f"{name}.weight")) for name in ("q_norm", "k_norm")}
        return LayerWeights(
            qkv=QkvWeights(
                norm1,
                self.with_bias(matrix(tensors["qkv.weight"]), tensors.get("qkv.bias")),
                **head_norms,
                qk_eps=config.norm_eps,
            ),
            attention=AttentionParams(config.attention_scales[index], config.windows[index], slopes),
            attn_out=matrix(tensors["attn_out.weight"]),
            attn_bias=self.vector(tensors.get("attn_out.bias")),
            mlp=MlpWeights(norm2, self.with_bias(matrix(up), up_bias), config.activation, config.gated),
            mlp_out=matrix(tensors["ff2.weight"]),
            mlp_bias=self.vector(tensors.get("ff2.bias")),
            shared_norm=config.shared_norm,
        )

    def top(self, tensors: dict[str, Tensor]) -> "TopWeights":
        """The matrices and norms outside the layers."""
        config = self.config
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
) -> ModelWeights:
    """Reads every tensor of `source` once; `quant` counts with int8 only.

    `progress(done, total)` and `done_with(layer)` are called after each layer.

    Raises ValueError for missing, extra, misshapen or non-finite tensors and for sizes that the kernels don't take.
    """
    check_names(policy, config, source, impl)
    builder = Builder(config, dtype, impl, quant, device)

    def get(name: str) -> Tensor:
        tensor = source.get(name, None if dtype == torch.int8 else dtype)
        check_finite(name, tensor)
        return tensor

    top = builder.top(policy.top_tensors(config, get))  # the largest matrices first, while nothing else is in memory
    layers: list[LayerWeights] = []
    before = Norm()
    for index in range(config.num_layers):
        tensors = policy.layer_tensors(config, index, get)
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
    policy.top_tensors(config, source.get)
    for index in range(config.num_layers):
        policy.layer_tensors(config, index, source.get)


def check_finite(name: str, tensor: Tensor) -> None:
    """Raises ValueError if the tensor holds a NaN or an infinity."""
    low, high = torch.aminmax(tensor)
    if not (torch.isfinite(low) and torch.isfinite(high)):
        raise ValueError(f"{name} holds values that are not finite (NaN or infinity); the checkpoint is damaged")


def _capacity(config: ModelConfig, dtype: torch.dtype, quant: Quantization) -> int:
    """Bytes of all packed matrices, their scales and float32 vectors, padding included; a tied head is packed once."""
    outside = dict(config.top_shapes())
    positions = outside.pop("positions.weight", (0, 0))
    total = 4 * positions[0] * positions[1] + 64
    quantised = [*config.layer_shapes().values()] * config.num_layers
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
    return total
