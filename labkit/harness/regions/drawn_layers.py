"""Random layers for the judge, as the references and as the C++ kernels read them.

The matrices are packed here, with torch, and not by the kernels: nothing of the kernels that are judged runs in the
process that judges them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from labkit.harness.judge.arrays import Input, Result
from labkit.harness.regions.kernel_arguments import pointers_to
from labkit.kernels.codes import LANES, pack_scales
from labkit.kernels.gemm import interleave_gate
from labkit.kernels.types import AttentionParams, Heads, Linear, MlpWeights, Norm, QkvWeights, float_dtype
from labkit.system.rounding import BLOCK

NORM_EPS = 1e-5


@dataclass(frozen=True)
class RegionShape:
    """Shape of a layer. `llama`: RMS norms, rotated heads and a gated MLP, and no biases; else as in GPT-2."""

    hidden: int
    heads: Heads
    intermediate: int
    llama: bool = False


@dataclass(frozen=True)
class RegionLayer:
    """Weights of one layer."""

    qkv: QkvWeights
    attention: AttentionParams
    attn_out: Linear
    mlp: MlpWeights
    mlp_out: Linear


@dataclass(frozen=True)
class DrawnLayer:
    """A layer with matrices of layout "rows", the same in the type in which torch computes with it, and the same as the
    kernels read it.

    inputs: the tensors of `packed`, by their addresses.
    """

    rows: RegionLayer
    own_type: RegionLayer
    packed: RegionLayer
    inputs: Mapping[int, Input | Result]

    @property
    def dtype(self) -> torch.dtype:
        """The type of the stored matrices."""
        return self.rows.attn_out.weight.dtype


def drawn_layer(shape: RegionShape, dtype: torch.dtype, rng: np.random.Generator) -> DrawnLayer:
    """Random weights; no bias and no norm is trivial, so a forgotten one shows."""
    layer = _random_layer(shape, dtype, rng)
    up = layer.mlp.up
    packed = replace(
        layer,
        qkv=replace(layer.qkv, proj=packed_rows(layer.qkv.proj)),
        attn_out=packed_rows(layer.attn_out),
        mlp=replace(layer.mlp, up=packed_rows(interleaved(up) if layer.mlp.gated else up)),
        mlp_out=packed_rows(layer.mlp_out),
    )
    return DrawnLayer(layer, converted(layer, float_dtype(dtype)), packed, pointers_to(packed))


def _random_layer(shape: RegionShape, dtype: torch.dtype, rng: np.random.Generator) -> RegionLayer:
    heads, hidden, inner = shape.heads, shape.hidden, shape.intermediate
    biased = not shape.llama
    norm = partial(_norm, rng, shape)
    matrix = partial(_matrix, rng, dtype=dtype, biased=biased)
    width = (heads.query + 2 * heads.kv) * heads.dim
    return RegionLayer(
        QkvWeights(norm(), matrix(width, hidden)),
        AttentionParams(heads.dim**-0.5),
        matrix(hidden, heads.query * heads.dim),
        MlpWeights(
            norm(),
            matrix(2 * inner if shape.llama else inner, hidden),
            "silu" if shape.llama else "gelu_tanh",
            shape.llama,
        ),
        matrix(hidden, inner),
    )


def packed_rows(matrix: Linear) -> Linear:
    """A matrix in the layout that the C++ kernels read, see `labkit.kernels.gemm.pack`."""
    rows, lanes = matrix.weight, LANES.get(matrix.weight.dtype, 1)
    padded = F.pad(rows, (0, -rows.shape[1] % lanes, 0, -rows.shape[0] % BLOCK))
    panels = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, lanes)).transpose(1, 2)
    bias = None if matrix.bias is None else F.pad(matrix.bias, (0, -matrix.outputs % BLOCK))
    scales = None if matrix.scales is None else pack_scales(matrix.scales)
    weight = (panels.squeeze(3) if lanes == 1 else panels).contiguous()
    return replace(matrix, weight=weight, bias=bias, scales=scales, layout="panels")


def interleaved(gate_up: Linear) -> Linear:
    """A matrix of gate and up rows as the kernels of a gated MLP read it."""
    weight, bias, scales = (
        None if part is None else interleave_gate(part) for part in (gate_up.weight, gate_up.bias, gate_up.scales)
    )
    assert weight is not None
    return replace(gate_up, weight=weight, bias=bias, scales=scales, outputs=len(weight))


def converted(value: Any, dtype: torch.dtype) -> Any:
    """A record or a tensor with its floats, and the numbers that its codes stand for, in another type."""
    if isinstance(value, Linear):
        bias = None if value.bias is None else value.bias.to(dtype)
        return replace(value, weight=value.floats(dtype), bias=bias, scales=None)
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{of.name: converted(getattr(value, of.name), dtype) for of in fields(value)})
    return value


def _norm(rng: np.random.Generator, shape: RegionShape) -> Norm:
    weight = 1 + drawn_numbers(rng, shape.hidden) / 4
    return (
        Norm("rms", weight, None, NORM_EPS)
        if shape.llama
        else Norm("layer", weight, drawn_numbers(rng, shape.hidden), NORM_EPS)
    )


def _matrix(rng: np.random.Generator, outputs: int, inputs: int, *, dtype: torch.dtype, biased: bool) -> Linear:
    numbers = drawn_numbers(rng, outputs, inputs) / inputs**0.5
    bias = drawn_numbers(rng, outputs) if biased else None
    if dtype != torch.int8:
        return Linear(numbers.to(dtype), bias, outputs, inputs, "rows")
    scales = (numbers.abs().amax(dim=1, keepdim=True) / 127).half()
    codes = (numbers / scales.float()).round().clamp(-127, 127).to(torch.int8)
    return Linear(codes, bias, outputs, inputs, "rows", scales[..., None], inputs + -inputs % LANES[torch.int8])


def drawn_numbers(rng: np.random.Generator, *sizes: int) -> Tensor:
    """Normally distributed numbers, float32."""
    return torch.from_numpy(rng.standard_normal(sizes, dtype=np.float32))
