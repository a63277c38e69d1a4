"""Packs canonical tensors into the records that kernels read, in memory that the caller chooses.

Matrices have the engine's dtype; norms, biases and position tables are float32. With int8 the layers' matrices, and on
request the LM head, are quantised to 8 or 4 bits from their stored precision; the other matrices are bfloat16.
Matrices are packed some rows at a time, so that little more than the result is in memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from labkit.kernels.checks import unchecked
from labkit.kernels.codes import PACKED, cut_groups, pack_scales
from labkit.kernels.decode_step import DenseMlp, EmbeddingWeights, HeadWeights, LayerWeights, ModelWeights
from labkit.kernels.gemm import interleave_gate, packed_shape
from labkit.kernels.gemm import pack as checked_pack
from labkit.kernels.gemm import packed as checked_packed
from labkit.kernels.memory import Place
from labkit.kernels.types import AttentionParams, Heads, Linear, MlpWeights, Norm, QkvWeights, float_dtype
from labkit.models.config import ModelConfig
from labkit.models.shards import SUMMED, Cut
from labkit.system.rounding import BLOCK, ceil_div
from labkit.weights.canonical import Canonical, RowBlocks, Weight, interleaved_rows, vectors_of
from labkit.weights.matrices import Outside
from labkit.weights.quantise import Scheme
from labkit.weights.spec import WeightSpec

pack, packed = unchecked(checked_pack), unchecked(checked_packed)

AT_ONCE, AT_LEAST = 1 << 20, 1 << 16  # numbers that are packed at once: fewer take longer
SHARE = 600  # bytes of a model per number packed at once; quantising a number takes about 40 bytes besides the result


def packed_at_once(size: int) -> int:
    """How many numbers are packed at once, so that packing takes little memory besides a model of `size` bytes."""
    return min(AT_ONCE, max(AT_LEAST, size // SHARE))


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

    @property
    def packs(self) -> bool:
        """Whether matrices are packed into `place`, as the C++ kernels read them."""
        return self.spec.impl == "cpp"

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory for a matrix that its file holds packed."""
        return self.place.empty(shape, dtype) if self.packs else torch.empty(shape, dtype=dtype)

    def linear(self, name: str, weight: Weight, *, columns: Cut | None = None, gated: bool = False) -> Linear:
        """The matrix of this canonical name as the implementation reads it, on its device. `with_bias` adds the bias.

        A `Linear` comes from a file. It is never quantised anew, and it is packed unless its layout is "rows".
        `columns`: keep only these, after the scales were taken from whole rows. `gated`: gate, then up rows.
        """
        if isinstance(weight, Linear):
            linear = replace(weight, activation_bits=self.spec.quant.activation_bits)
            return self._on_device(linear) if linear.layout != "rows" else self._placed(linear, columns, gated)
        matrix, scheme = RowBlocks.of(weight), self.spec.scheme(name)
        if scheme is None:
            if self.packs:
                return self._packed(matrix, None, None, gated)
            rows = matrix.whole().to(self.device, float_dtype(self.spec.dtype))
            # Tensors that are on a GPU in the right type are shared with the caller's model.
            rows = rows.contiguous() if self.device.type != "cpu" else rows.contiguous().clone()
            return packed(Linear(rows, None, *matrix.shape, "rows"), self.spec.impl)
        if self.packs and scheme.flat is None:
            return self._packed(matrix, scheme, columns, gated)
        rows = matrix.whole().to(self.device)
        scales, group = scheme.scales(rows)
        codes = scheme.codes(rows, scales, group)
        linear = Linear(codes, None, *matrix.shape, "rows", scales, group, scheme.bits, self.spec.quant.activation_bits)
        return self._placed(linear, columns, gated)

    def _packed(self, matrix: RowBlocks, scheme: Scheme | None, columns: Cut | None, gated: bool) -> Linear:
        """Packs a matrix, and quantises it if there is a scheme, some rows at a time."""
        outputs, inputs = matrix.shape
        first, last = columns.ranges[0] if columns else (0, inputs)
        parts = matrix.halves() if gated else (matrix,)
        stored = interleaved_rows(outputs) if gated else outputs
        dtype = PACKED[scheme.bits] if scheme else float_dtype(self.spec.dtype)
        panels = self.place.empty(packed_shape(stored, last - first, dtype), dtype)
        scale_panels = []
        group = 0
        step = max(BLOCK, self.at_once // inputs // BLOCK * BLOCK)
        for begin in range(0, stored, step):
            end = min(begin + step, stored)
            into = panels[begin // BLOCK : ceil_div(end, BLOCK)]
            rows = [part.rows(begin // len(parts), min(end // len(parts), part.shape[0])) for part in parts]
            if scheme is None:
                pack(*(some.to(dtype) for some in rows), out=into)
                continue
            codes, scales, groups = zip(*(_quantised(scheme, some, columns) for some in rows), strict=True)
            pack(*codes, out=into, bits=scheme.bits)
            scale_panels.append(pack_scales(interleave_gate(torch.cat(scales)) if gated else scales[0]))
            group = groups[0]
        linear = Linear(panels, None, stored, last - first, "panels")
        if scheme is None:
            return linear
        return replace(
            linear,
            scales=self._kept(torch.cat(scale_panels)),
            group=group,
            bits=scheme.bits,
            activation_bits=self.spec.quant.activation_bits,
        )

    def _placed(self, linear: Linear, columns: Cut | None, gated: bool) -> Linear:
        """Lays out a quantised or floating matrix of layout "rows" as the implementation reads it."""
        weight, scales, group = linear.weight, linear.scales, linear.group
        if columns is not None:
            assert scales is not None
            weight, scales, group = _some_columns(columns, weight, scales, group, linear.bits)
        linear = replace(linear, weight=weight, scales=scales, inputs=weight.shape[1], group=group)
        if not self.packs:
            scales = None if scales is None else scales.to(self.device).contiguous()
            return packed(replace(linear, weight=weight.to(self.device).contiguous(), scales=scales), self.spec.impl)
        if gated and scales is not None:
            scales = interleave_gate(scales)
        outputs, inputs = interleaved_rows(len(weight)) if gated else len(weight), weight.shape[1]
        bits = linear.bits if scales is not None else 8
        dtype = PACKED[bits] if scales is not None else weight.dtype
        parts = weight.chunk(2) if gated else (weight,)
        panels = pack(*parts, out=self.place.empty(packed_shape(outputs, inputs, dtype), dtype), bits=bits)
        scales = None if scales is None else self._kept(pack_scales(scales))
        return replace(linear, weight=panels, outputs=outputs, layout="panels", scales=scales)

    def _on_device(self, linear: Linear) -> Linear:
        """Moves a packed matrix to the device."""
        scales = None if linear.scales is None else linear.scales.to(self.device)
        return replace(linear, weight=linear.weight.to(self.device), scales=scales)

    def _kept(self, tensor: Tensor) -> Tensor:
        """A copy in the matrices' memory."""
        return self.place.empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)

    def with_bias(self, linear: Linear, bias: Tensor | None) -> Linear:
        """The matrix with this bias; with layout "panels" the bias is padded to whole blocks."""
        if bias is None:
            return linear
        if linear.layout == "panels":
            bias = pad(bias, (0, -len(bias) % BLOCK))
        return replace(linear, bias=self.vector(bias))

    def norm(self, tensors: dict[str, Tensor], name: str) -> Norm:
        """The norm of this canonical name; an empty `Norm` where the model has none."""
        if (weight := self.gain(tensors.get(f"{name}.weight"))) is None:
            return Norm()
        return Norm(self.config.norm, weight, self.vector(tensors.get(f"{name}.bias")), self.config.norm_eps)

    def gain(self, stored: Tensor | None) -> Tensor | None:
        """The weight of a norm, from the stored one."""
        weight, offset = self.vector(stored), self.config.norm_offset
        return weight if weight is None or not offset else weight.add_(offset)

    def last_norm(self, tensors: Canonical) -> Norm:
        """The norm of the output of a post-norm layer with these tensors; an empty `Norm` for pre-norm layers."""
        return Norm() if self.config.pre_norm else self.norm(vectors_of(tensors), "norm2")

    def vector(self, tensor: Tensor | None) -> Tensor | None:
        """A float32 copy in the matrices' memory: small blocks that stay on the heap would keep it from shrinking."""
        if tensor is None:
            return None
        return self.place.empty(tuple(tensor.shape), torch.float32).copy_(tensor)

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
        slopes = self.vector(torch.tensor(self.spec.part.alibi_slopes)) if config.position == "alibi" else None
        whole = self.spec.part.sums_whole
        cuts = {name: replace(self.spec.part, sums_whole=False).cut(name) if whole else None for name in SUMMED}
        attn_bias, mlp_bias = vectors.get("attn_out.bias"), vectors.get("ff2.bias")
        if config.parallel_residual and self.spec.part.size > 1:  # one sum of the ranks for both
            attn_bias, mlp_bias = None, _sum(attn_bias, mlp_bias)
        up = self.with_bias(matrix("ff1.weight", gated=config.gated), up_bias)
        head_norms = {name: self.gain(vectors.get(f"{name}.weight")) for name in ("q_norm", "k_norm")}
        qkv = self.with_bias(matrix("qkv.weight"), vectors.get("qkv.bias"))
        return LayerWeights(
            qkv=QkvWeights(norm1, qkv, **head_norms, qk_eps=config.norm_eps),
            attention=AttentionParams(
                config.attention_scales[local], config.windows[local], slopes, config.causal, config.attention_cap
            ),
            attn_out=matrix("attn_out.weight", columns=cuts["attn_out.weight"]),
            attn_bias=self.vector(attn_bias),
            mlp=DenseMlp(
                MlpWeights(norm2, up, config.activation, config.gated, self.norm(vectors, "attn_out_norm")),
                out=matrix("ff2.weight", columns=cuts["ff2.weight"]),
                out_bias=self.vector(mlp_bias),
                out_norm=self.norm(vectors, "mlp_out_norm"),
            ),
            shared_norm=config.shared_norm,
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
            embedding = EmbeddingWeights(
                table=self._tied_table(matrix) if config.tied_head else self._table(tensors["embed.weight"]),
                packed=matrix if config.tied_head else None,
                size=config.embedding_size,
                vocab=part.vocab,
                norm=self.norm(vectors, "embed_norm"),
                project_in=project_in,
                positions=self.vector(vectors.get("positions.weight")),
                position_offset=config.position_offset,
                scale=scale,
            )
        if part.head:
            assert matrix is not None
            matrix, vocab = self.with_bias(matrix, vectors.get("head.bias")), config.vocab_size
            head = HeadWeights(matrix, part.vocab, vocab, project_out, config.logit_cap)
        return Outside(embedding, self.norm(vectors, "final_norm") if "final_norm.weight" in vectors else None, head)

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
            intermediate=config.intermediate_size,
            embedding=outside.embedding,
            final_norm=(outside.final_norm or last_norm) if ends else Norm(),
            head=outside.head,
            parallel_residual=config.parallel_residual,
            residual_from_norm=config.residual_from_norm or not config.pre_norm,
        )


def _rows_of(linear: Linear) -> Tensor:
    """The rows of a matrix that is not packed into panels. Codes become float32 numbers."""
    return linear.weight if linear.scales is None else linear.floats()


def _sum(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first.float() + second.float()


def _quantised(scheme: Scheme, rows: Tensor, columns: Cut | None) -> tuple[Tensor, Tensor, int]:
    """Some whole rows of a matrix, quantised: (codes, scales, group). columns: keep only these."""
    scales, group = scheme.scales(rows)
    codes = scheme.codes(rows, scales, group)
    return (codes, scales, group) if columns is None else _some_columns(columns, codes, scales, group, scheme.bits)


def _some_columns(columns: Cut, codes: Tensor, scales: Tensor, group: int, bits: int) -> tuple[Tensor, Tensor, int]:
    """The columns that a cut takes of a quantised matrix: (codes, scales, group).

    If the cut begins within a group, the groups become so small that each has one scale.
    """
    (begin, end), *more = columns.ranges
    assert not more
    starts, size = cut_groups(begin, end, group, scales.shape[1], bits)
    return codes[:, begin:end], scales[:, [at // group for at in starts]], size
