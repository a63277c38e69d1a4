"""Packs the matrices of a transformers model's parts: linears, several of them as one, and stacks of experts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from labkit.kernels.gemm import interleave_gate
from labkit.kernels.memory import Arena
from labkit.kernels.types import Linear, float_dtype
from labkit.models.observed.calls import bias_of, matrix
from labkit.system.rounding import round_up
from labkit.weights.canonical import RowBlocks
from labkit.weights.packing import Packer, packed_at_once
from labkit.weights.quantise import Quantization

LAYER, HEAD = "qkv.weight", "head.weight"  # canonical names, whose schemes all linears and the head have
FEW_OUTPUTS = 1024  # a linear with fewer is not quantised if its inputs are many times more
OTHERS = 1 << 16  # bytes of a matrix besides its numbers: padding, scales and bias


class PartPacker:
    """Packs matrices into one piece of memory.

    dtype: of the matrices; int8: quantised as `quant` says, the head in bfloat16 unless `quant` names it.
    shapes: [outputs, inputs] of all matrices that may be packed.
    """

    def __init__(self, dtype: torch.dtype, quant: Quantization, shapes: Iterable[tuple[int, int]]) -> None:
        self.dtype, self.quant = dtype, quant
        room = numbers = 0
        for rows, columns in shapes:
            room += round_up(rows, 64) * round_up(columns, 128) * float_dtype(dtype).itemsize * 2 + OTHERS
            numbers += rows * columns
        bits = quant.weight.num_bits if self.quantises else 8 * dtype.itemsize
        at_once = packed_at_once(numbers * bits // 8)
        self._packer = Packer("cpp", float_dtype(dtype), quant.activation_bits, Arena.reserved(room), at_once)

    @property
    def quantises(self) -> bool:
        return not self.dtype.is_floating_point

    def stays_floats(self, linear: nn.Module) -> bool:
        """Whether a linear is not quantised, because it may choose experts, and codes would choose others."""
        outputs, inputs = matrix(linear).shape
        return self.quantises and outputs < min(FEW_OUTPUTS, inputs // 4)

    def linears(
        self, linears: Sequence[nn.Module], name: str = LAYER, *, gated: bool = False, swapped: bool = False
    ) -> Linear:
        """The matrices of these linears as one, one below the other. gated: as the gate and up rows of an MLP.
        swapped: the halves of the matrix change places.
        """
        weights, biases = [matrix(linear) for linear in linears], [bias_of(linear) for linear in linears]
        if swapped:
            (weight,), (bias,) = weights, biases
            weights = [*weight.chunk(2)[::-1]]
            biases = [None, None] if bias is None else [*bias.chunk(2)[::-1]]
        bias = None
        if any(part is not None for part in biases):
            bias = torch.cat([
                weight.new_zeros(len(weight)) if bias is None else bias
                for weight, bias in zip(weights, biases, strict=True)
            ])  # fmt: skip
        quantised = self.quantises and not self.stays_floats(linears[0])
        return self._matrix(RowBlocks.joined(weights), bias, name if quantised else None, gated=gated)

    def stack(self, weights: Tensor, biases: Tensor | None, *, gated: bool = False) -> tuple[Linear, ...]:
        """The matrices [E, outputs, inputs] of a stack of experts, with biases [E, outputs] or None."""
        name = LAYER if self.quantises else None
        rows = [None] * len(weights) if biases is None else list(biases)
        return tuple(
            self._matrix(RowBlocks.of(weight), bias, name, gated=gated)
            for weight, bias in zip(weights, rows, strict=True)
        )

    def _matrix(self, rows: RowBlocks, bias: Tensor | None, name: str | None, *, gated: bool) -> Linear:
        """name: whose scheme the matrix gets; None: it stays floats."""
        packed = self._packer.matrix(rows, None if name is None else self.quant.of(name), gated=gated)
        return self._packer.with_bias(packed, interleave_gate(bias) if gated and bias is not None else bias)
