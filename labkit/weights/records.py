"""Packs canonical tensors into the records that kernels read, in memory that the caller chooses.

Matrices have the engine's dtype; norms, biases and position tables are float32. With int8 the layers' matrices, and on
request the LM head, are quantised to 8 or 4 bits from their stored precision; the other matrices are bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from labkit.kernels import Router
from labkit.kernels.decode_step import (
    AMONG_EXPERTS,
    OF_MLP,
    DenseMlp,
    EmbeddingWeights,
    HeadWeights,
    LayerWeights,
    MixtureMlp,
    ModelWeights,
    SharedExpert,
)
from labkit.kernels.gemm import interleave_gate
from labkit.kernels.memory import Place
from labkit.kernels.types import NO_NORM, AttentionParams, Heads, Linear, MlpWeights, Norm, QkvWeights, float_dtype
from labkit.models.config import CHOICE_BIAS, ExpertsSpec, ModelConfig
from labkit.models.shards import SUMMED, Cut
from labkit.weights.canonical import Canonical, RowBlocks, Weight, vectors_of
from labkit.weights.matrices import Outside
from labkit.weights.packing import AT_ONCE, Packer
from labkit.weights.spec import WeightSpec


@dataclass(frozen=True)
class Builder:
    """Turns canonical tensors into weight records for one implementation."""

    spec: WeightSpec
    place: Place  # where the records get their memory
    at_once: int = AT_ONCE  # about how many numbers are packed at once

    @property
    def device(self) -> torch.device:
        return self.place.device

    @property
    def config(self) -> ModelConfig:
        """The config of this rank's part."""
        return self.spec.part.local

    @cached_property
    def packer(self) -> Packer:
        spec = self.spec
        return Packer(spec.impl, float_dtype(spec.dtype), spec.quant.activation_bits, self.place, self.at_once)

    @property
    def packs(self) -> bool:
        """Whether matrices are packed, as the C++ kernels read them."""
        return self.packer.packs

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory for a matrix that its file holds packed."""
        return self.packer.empty(shape, dtype)

    def linear(self, name: str, weight: Weight, **options: Any) -> Linear:
        """The matrix of this canonical name, with the options of `Packer.matrix`."""
        return self.packer.matrix(weight, self.spec.scheme(name), **options)

    def norm(self, tensors: dict[str, Tensor], name: str) -> Norm:
        """The norm of this canonical name; an empty `Norm` where the model has none."""
        if (weight := self.gain(tensors.get(f"{name}.weight"))) is None:
            return Norm()
        # Layers without a residual scale compute the same with rows that are divided by it: norms do not see the size
        # of their rows, apart from the epsilon.
        scaled = self.config.residual_scale if name in ("norm1", "norm2", "final_norm") else 1.0
        eps = self.config.norm_eps / scaled**2
        return Norm(self.config.norm, weight, self.packer.vector(tensors.get(f"{name}.bias")), eps)

    def gain(self, stored: Tensor | None) -> Tensor | None:
        """The weight of a norm, from the stored one."""
        weight, offset = self.packer.vector(stored), self.config.norm_offset
        return weight if weight is None or not offset else weight.add_(offset)

    def last_norm(self, tensors: Canonical) -> Norm:
        """The norm of the output of a post-norm layer with these tensors; an empty `Norm` for pre-norm layers."""
        return Norm() if self.config.pre_norm else self.norm(vectors_of(tensors), "norm2")

    def layer(self, index: int, tensors: Canonical, norm_before: Norm) -> LayerWeights:
        """Layer `index` of the model. `norm_before`: the norm of a post-norm layer's input, which is the last norm of
        the layer before.
        """
        config, vectors, local = self.config, vectors_of(tensors), index - self.spec.part.layers.start
        norm1 = self.norm(vectors, "norm1")
        norm2 = norm1 if config.shared_norm else self.norm(vectors, "norm2")
        if not config.pre_norm:
            norm1, norm2 = norm_before, norm1

        def matrix(name: str, **options: Any) -> Linear:
            return self.linear(name, tensors[name], **options)

        up_bias = vectors.get("ff1.bias")
        if config.gated and self.packs and up_bias is not None:
            up_bias = interleave_gate(up_bias)
        slopes = self.packer.vector(torch.tensor(self.spec.part.alibi_slopes)) if config.position == "alibi" else None
        whole = self.spec.part.sums_whole
        cut = replace(self.spec.part, sums_whole=False).cut
        cuts = {name: cut(name) if whole and name in tensors else None for name in SUMMED}
        attn_bias, mlp_bias = vectors.get("attn_out.bias"), vectors.get("ff2.bias")
        if config.parallel_residual and self.spec.part.size > 1:  # one sum of the ranks for both
            attn_bias, mlp_bias = None, _sum(attn_bias, mlp_bias)
        if config.experts is not None and config.has_experts(local):
            mlp: DenseMlp | MixtureMlp = self._mixture(config.experts, matrix, cuts, norm2, vectors)
        else:
            names = OF_MLP if config.experts is None else AMONG_EXPERTS
            up = self.packer.with_bias(matrix(names[0], gated=config.gated), up_bias)
            mlp = DenseMlp(
                MlpWeights(norm2, up, config.activation, config.gated, self.norm(vectors, "attn_out_norm")),
                out=matrix(names[1], columns=cuts[names[1]]),
                out_bias=self.packer.vector(mlp_bias),
                out_norm=self.norm(vectors, "mlp_out_norm"),
                names=names,
            )
        head_norms = {name: self.gain(vectors.get(f"{name}.weight")) for name in ("q_norm", "k_norm")}
        qkv = self.packer.with_bias(matrix("qkv.weight"), vectors.get("qkv.bias"))
        return LayerWeights(
            qkv=QkvWeights(
                norm1,
                qkv,
                **head_norms,
                qk_eps=config.norm_eps,
                table=config.rotary_tables[local] if config.rotary_tables else 0,
                whole_norms=config.qk_norm_whole,
            ),
            attention=AttentionParams(
                config.attention_scales[local],
                config.windows[local],
                slopes,
                config.causal,
                config.attention_cap,
                self.packer.vector(vectors.get("sinks.weight")),
            ),
            attn_out=matrix("attn_out.weight", columns=cuts["attn_out.weight"]),
            attn_bias=self.packer.vector(attn_bias),
            mlp=mlp,
            shared_norm=config.shared_norm,
        )

    def _mixture(
        self,
        experts: ExpertsSpec,
        matrix: Callable[..., Linear],
        cuts: Mapping[str, Cut | None],
        norm: Norm,
        vectors: dict[str, Tensor],
    ) -> MixtureMlp:
        """The mixture of a layer. norm: of its input. `matrix` makes the matrix of a canonical name."""
        config, shared = self.config, None
        if experts.shared:
            up = matrix("shared_ff1.weight", gated=config.gated)
            shared = SharedExpert(
                MlpWeights(NO_NORM, up, config.activation, config.gated),
                matrix("shared_ff2.weight", columns=cuts["shared_ff2.weight"]),
                matrix("shared_gate.weight") if experts.shared_gate else None,
            )
        router = self.packer.with_bias(matrix("router.weight"), vectors.get("router.bias"))
        count = len(experts.own)
        ups = matrix("ff1.weight", gated=config.gated, experts=count)
        outs = matrix("ff2.weight", columns=cuts["ff2.weight"], experts=count)
        # Several ranks may have a part of the same experts: the first one adds the biases to the sum.
        out_bias = vectors.get("ff2.bias") if self.spec.part.inner.start == 0 else None
        return MixtureMlp(
            Router(
                norm,
                router,
                experts.chosen,
                experts.renormalised,
                self.norm(vectors, "attn_out_norm"),
                experts.scores,
                self.packer.vector(vectors.get(CHOICE_BIAS)),
                experts.factor,
            ),
            own=experts.own,
            ups=self.packer.with_biases(ups, vectors.get("ff1.bias"), count, gated=config.gated),
            outs=self.packer.with_biases(outs, out_bias, count),
            activation=config.activation,
            gated=config.gated,
            hidden=config.hidden_size,
            out_norm=self.norm(vectors, "mlp_out_norm"),
            shared=shared,
        )

    def outside(self, tensors: Canonical) -> Outside:
        """This rank's weights outside the layers."""
        config, part, vectors = self.config, self.spec.part, vectors_of(tensors)
        name = "embed.weight" if config.tied_head else "head.weight"
        matrix = self.linear(name, tensors[name]) if name in tensors else None
        project_in, project_out = (
            self.linear(name, tensors[name]) if name in tensors else None
            for name in ("project_in.weight", "project_out.weight")
        )
        embedding, head = None, None
        if part.embedding:
            # rounded to the type of the embedding, in which transformers multiplies
            scale = float(torch.tensor(config.embedding_scale, dtype=float_dtype(self.spec.dtype)))
            scale /= config.residual_scale
            embedding = EmbeddingWeights(
                table=self._tied_table(matrix) if config.tied_head else self._table(tensors["embed.weight"]),
                packed=matrix if config.tied_head else None,
                size=config.embedding_size,
                vocab=part.vocab,
                norm=self.norm(vectors, "embed_norm"),
                project_in=project_in,
                positions=self.packer.vector(vectors.get("positions.weight")),
                position_offset=config.position_offset,
                scale=scale,
                norm_first=config.positions_after_norm,
            )
        if part.head:
            assert matrix is not None
            matrix, vocab = self.packer.with_bias(matrix, vectors.get("head.bias")), config.vocab_size
            head = HeadWeights(matrix, part.vocab, vocab, project_out, config.logit_cap)
        final_norm = self.norm(vectors, "final_norm") if "final_norm.weight" in vectors else None
        if final_norm is not None and config.logit_scale != 1:
            for vector in (final_norm.weight, final_norm.bias):
                if vector is not None:
                    vector.mul_(config.logit_scale)
        return Outside(embedding, final_norm, head)

    def _tied_table(self, head: Linear | None) -> Tensor | None:
        """The rows of an embedding that the head shares; None where the head's packed matrix serves lookups."""
        assert head is not None
        return _rows_of(head) if self.spec.impl == "reference" else None

    def _table(self, rows: Weight) -> Tensor:
        """The rows of an embedding that the head does not share."""
        if isinstance(rows, Linear):
            return _rows_of(rows).to(self.device, float_dtype(self.spec.dtype)).contiguous()
        blocks = RowBlocks.of(rows)
        table = torch.empty(blocks.shape, dtype=float_dtype(self.spec.dtype), device=self.device)
        step = max(1, self.at_once // blocks.shape[1])
        for begin in range(0, len(table), step):
            table[begin : begin + step] = blocks.rows(begin, min(begin + step, len(table)))
        return table

    def model(self, layers: list[LayerWeights], outside: Outside, last_norm: Norm) -> ModelWeights:
        """The records of the whole part. `last_norm`: norm of a post-norm model's output, instead of a final norm."""
        config = self.config
        ends = self.spec.part.layers.stop == self.spec.part.config.num_layers
        return ModelWeights(
            layers=tuple(layers),
            heads=Heads(config.num_heads, config.num_kv_heads, config.head_dim),
            hidden=config.hidden_size,
            intermediate=_widest_mlp(config),
            embedding=outside.embedding,
            final_norm=(outside.final_norm or last_norm) if ends else Norm(),
            head=outside.head,
            parallel_residual=config.parallel_residual,
            residual_from_norm=config.residual_from_norm or not config.pre_norm,
        )


def _widest_mlp(config: ModelConfig) -> int:
    """The width of the widest MLP, experts apart; 1 without one."""
    return max(config.experts.shared, config.dense_size, 1) if config.experts else config.intermediate_size


def _rows_of(linear: Linear) -> Tensor:
    """The rows of a matrix that is not packed into panels. Codes become float32 numbers."""
    return linear.weight if linear.scales is None else linear.floats()


def _sum(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first.float() + second.float()
