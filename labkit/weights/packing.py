"""Packs matrices into the records that kernels read, in memory that the caller chooses.

A matrix is packed some rows at a time, so that little more than the result is in memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from labkit.kernels.checks import unchecked
from labkit.kernels.codes import PACKED, cut_groups, pack_scales
from labkit.kernels.gemm import interleave_gate, packed_shape
from labkit.kernels.gemm import pack as checked_pack
from labkit.kernels.gemm import packed as checked_packed
from labkit.kernels.memory import Place
from labkit.kernels.types import Linear
from labkit.models.shards import Cut
from labkit.system.rounding import BLOCK, ceil_div, round_up
from labkit.weights.canonical import RowBlocks, Weight, interleaved_rows
from labkit.weights.quantise import Scheme

pack, packed = unchecked(checked_pack), unchecked(checked_packed)

AT_ONCE, AT_LEAST = 1 << 20, 1 << 16  # numbers that are packed at once: fewer take longer
SHARE = 600  # bytes of a model per number packed at once; quantising a number takes about 40 bytes besides the result


def packed_at_once(size: int) -> int:
    """How many numbers are packed at once, so that packing takes little memory besides a model of `size` bytes."""
    return min(AT_ONCE, max(AT_LEAST, size // SHARE))


@dataclass(frozen=True)
class Packer:
    """Packs matrices for one implementation.

    dtype: of matrices that are not quantised.
    activation_bits: see `Linear`.
    place: where the records get their memory.
    at_once: about how many numbers are packed at once.
    """

    impl: str
    dtype: torch.dtype
    activation_bits: int
    place: Place
    at_once: int = AT_ONCE

    @property
    def packs(self) -> bool:
        """Whether matrices are packed into `place`, as the C++ kernels read them."""
        return self.impl == "cpp"

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory for a matrix that its file holds packed."""
        return self.place.empty(shape, dtype) if self.packs else torch.empty(shape, dtype=dtype)

    def matrix(
        self,
        weight: Weight,
        scheme: Scheme | None,
        *,
        columns: Cut | None = None,
        gated: bool = False,
        experts: int = 1,
    ) -> Linear:
        """A matrix as the implementation reads it, on its device. `with_bias` adds the bias.

        scheme: how it is quantised; None: it is stored in floating point.

        A `Linear` comes from a file. It is never quantised anew, and it is packed unless its layout is "rows".
        `columns`: keep only these, after the scales were taken from whole rows. `gated`: gate, then up rows. `experts`:
        the matrices of this many experts, one below the other; each is packed by itself.
        """
        if isinstance(weight, Linear):
            linear = replace(weight, activation_bits=self.activation_bits)
            return self._on_device(linear) if linear.layout != "rows" else self._placed(linear, columns, gated, experts)
        matrix = RowBlocks.of(weight)
        if scheme is None:
            if self.packs:
                return self._packed(matrix, None, None, gated, experts)
            rows = matrix.whole().to(self.place.device, self.dtype)
            # Tensors that are on a GPU in the right type are shared with the caller's model.
            rows = rows.contiguous() if self.place.device.type != "cpu" else rows.contiguous().clone()
            return packed(Linear(rows, None, *matrix.shape, "rows"), self.impl)
        if self.packs and scheme.flat is None:
            return self._packed(matrix, scheme, columns, gated, experts)
        rows = matrix.whole().to(self.place.device)
        scales, group = scheme.scales(rows)
        codes = scheme.codes(rows, scales, group)
        linear = Linear(codes, None, *matrix.shape, "rows", scales, group, scheme.bits, self.activation_bits)
        return self._placed(linear, columns, gated, experts)

    def _packed(
        self, matrix: RowBlocks, scheme: Scheme | None, columns: Cut | None, gated: bool, experts: int
    ) -> Linear:
        """Packs a matrix, and quantises it if there is a scheme, some rows at a time."""
        outputs, inputs = matrix.shape[0] // experts, matrix.shape[1]
        first, last = columns.ranges[0] if columns else (0, inputs)
        stored = _stored_rows(outputs, gated, experts)
        dtype = PACKED[scheme.bits] if scheme else self.dtype
        panels = self.place.empty(packed_shape(experts * stored, last - first, dtype), dtype)
        scales: list[Tensor] = []
        group = 0
        for number, into in enumerate(panels.chunk(experts)):
            group = self._pack_into(into, matrix.part(number, experts), scheme, columns, gated, scales)
        linear = Linear(panels, None, experts * stored, last - first, "panels")
        if scheme is None:
            return linear
        return replace(
            linear,
            scales=self._kept(torch.cat(scales)),
            group=group,
            bits=scheme.bits,
            activation_bits=self.activation_bits,
        )

    def _pack_into(
        self,
        panels: Tensor,
        matrix: RowBlocks,
        scheme: Scheme | None,
        columns: Cut | None,
        gated: bool,
        scale_panels: list[Tensor],
    ) -> int:
        """Packs a matrix into `panels`, and appends its packed scales to `scale_panels`. Returns the group of these."""
        outputs, inputs = matrix.shape
        parts = matrix.halves() if gated else (matrix,)
        stored = interleaved_rows(outputs) if gated else outputs
        group = 0
        step = max(BLOCK, self.at_once // inputs // BLOCK * BLOCK)
        for begin in range(0, stored, step):
            end = min(begin + step, stored)
            into = panels[begin // BLOCK : ceil_div(end, BLOCK)]
            rows = [part.rows(begin // len(parts), min(end // len(parts), part.shape[0])) for part in parts]
            if scheme is None:
                pack(*(some.to(self.dtype) for some in rows), out=into)
                continue
            codes, scales, groups = zip(*(_quantised(scheme, some, columns) for some in rows), strict=True)
            pack(*codes, out=into, bits=scheme.bits)
            scale_panels.append(pack_scales(interleave_gate(torch.cat(scales)) if gated else scales[0]))
            group = groups[0]
        return group

    def _placed(self, linear: Linear, columns: Cut | None, gated: bool, experts: int) -> Linear:
        """Lays out a quantised or floating matrix of layout "rows" as the implementation reads it."""
        weight, scales, group = linear.weight, linear.scales, linear.group
        if columns is not None:
            assert scales is not None
            weight, scales, group = _some_columns(columns, weight, scales, group, linear.bits)
        linear = replace(linear, weight=weight, scales=scales, inputs=weight.shape[1], group=group)
        if not self.packs:
            scales = None if scales is None else scales.to(self.place.device).contiguous()
            return packed(replace(linear, weight=weight.to(self.place.device).contiguous(), scales=scales), self.impl)
        bits = linear.bits if scales is not None else 8
        dtype = PACKED[bits] if scales is not None else weight.dtype
        stored = experts * _stored_rows(len(weight) // experts, gated, experts)
        panels = self.place.empty(packed_shape(stored, weight.shape[1], dtype), dtype)
        for rows, into in zip(weight.chunk(experts), panels.chunk(experts), strict=True):
            pack(*(rows.chunk(2) if gated else (rows,)), out=into, bits=bits)
        if scales is not None:
            of_experts = [interleave_gate(part) if gated else part for part in scales.chunk(experts)]
            scales = self._kept(torch.cat([pack_scales(part) for part in of_experts]))
        return replace(linear, weight=panels, outputs=stored, layout="panels", scales=scales)

    def _on_device(self, linear: Linear) -> Linear:
        """Moves a packed matrix to the device."""
        scales = None if linear.scales is None else linear.scales.to(self.place.device)
        return replace(linear, weight=linear.weight.to(self.place.device), scales=scales)

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

    def with_biases(self, stack: Linear, biases: Tensor | None, experts: int, *, gated: bool = False) -> Linear:
        """The matrices of experts with their biases, one after the other. gated: gate, then up, of each expert."""
        if biases is None or stack.layout != "panels":
            return self.with_bias(stack, biases)
        rows = stack.outputs // experts
        of_experts = [interleave_gate(bias) if gated else bias for bias in biases.chunk(experts)]
        return self.with_bias(stack, torch.cat([pad(bias, (0, rows - len(bias))) for bias in of_experts]))

    def vector(self, tensor: Tensor | None) -> Tensor | None:
        """A float32 copy in the matrices' memory: small blocks that stay on the heap would keep it from shrinking."""
        if tensor is None:
            return None
        return self.place.empty(tuple(tensor.shape), torch.float32).copy_(tensor)


def _stored_rows(outputs: int, gated: bool, experts: int) -> int:
    """Rows of a packed matrix, or of one of several experts, which have whole blocks each."""
    rows = interleaved_rows(outputs) if gated else outputs
    return rows if experts == 1 else round_up(rows, BLOCK)


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
