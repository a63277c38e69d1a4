"""Questions about the kernel of a region: new layers and rows, the arguments of its C function, the right results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from labkit.harness.judge.arrays import JudgedCall, Result
from labkit.harness.judge.judge import Question
from labkit.harness.regions.drawn_layers import DrawnLayer, RegionLayer, RegionShape, converted, drawn_numbers
from labkit.harness.regions.kernel_arguments import input_of, padded, pointers_to, record_of, result_of
from labkit.kernels.attention.reference import attention
from labkit.kernels.mlp_gemm.reference import mlp_gemm
from labkit.kernels.plain import linear
from labkit.kernels.qkv_gemm.reference import qkv_gemm
from labkit.kernels.residual_add.reference import residual_add
from labkit.kernels.types import NO_NORM, NO_ROTARY, LayerCache, Linear, Rotary, Rows, float_dtype, padded_head_dim
from labkit.stages import Stage

# The C function of each region, and a letter for each of its arguments: p is a pointer, i an int64.
FUNCTIONS = {
    Stage.QKV: ("labkit_qkv_gemm", "ppppppippi"),
    Stage.ATTENTION: ("labkit_attention", "ppppppi"),
    Stage.ATTN_OUT: ("labkit_gemm", "ppipi"),
    Stage.MLP: ("labkit_mlp_gemm", "ppppiippi"),
    Stage.MLP_OUT: ("labkit_gemm", "ppipi"),
    Stage.RESIDUAL: ("labkit_residual_add", "ppppppiipi"),
}
ROTARY_BASE = 10_000.0
Results = tuple[Tensor, ...]  # what a region computes, in the order of the outputs in the arguments of its C function
Convert = Callable[[Any], Any]  # tensors, or records of tensors, to the same in another type
# From a layer, the conversion of inputs to its type, and the rounding of activations: a function that computes results.
Prepare = Callable[[RegionLayer, Convert, Convert], Callable[[], Results]]


@dataclass(frozen=True)
class RegionCase:
    """A question, and the same computed by torch's ops one by one, in the type of the weights."""

    question: Question
    unfused: Callable[[], Results]


def region_case(
    region: Stage,
    shape: RegionShape,
    layer: DrawnLayer,
    rng: np.random.Generator,
    *,
    batch: int,
    past: int,
    threads: int,
) -> RegionCase:
    """A call of the region's kernel for the next token of `batch` sequences with `past` tokens."""
    asked = _Asked(shape, layer, rng, batch, past)
    of_region: dict[Stage, Callable[[], tuple[Sequence[Any], Prepare]]] = {
        Stage.QKV: asked.qkv,
        Stage.ATTENTION: asked.attention,
        Stage.ATTN_OUT: partial(asked.product, "attn_out"),
        Stage.MLP: asked.mlp,
        Stage.MLP_OUT: partial(asked.product, "mlp_out"),
        Stage.RESIDUAL: asked.residual,
    }
    arguments, prepare = of_region[region]()
    double = partial(converted, dtype=torch.float64)
    call = JudgedCall((*arguments, threads))
    exact, rounded = (
        [padded(got, result) for got, result in zip(results(), call.checked, strict=True)]
        for results in (prepare(double(layer.rows), double, _same), prepare(layer.rows, _same, asked.rounded))
    )
    to_own_type = partial(converted, dtype=float_dtype(layer.dtype))
    return RegionCase(Question(call, exact, plain=rounded), prepare(layer.own_type, to_own_type, _same))


class _Asked:
    """The rows of a call, and a method for each region, with random inputs for them.

    A method returns the arguments of the region's C function, without the number of threads, which is the last one. It
    also returns a `Prepare`, with which the right results for these inputs are computed in different types.
    """

    def __init__(self, shape: RegionShape, layer: DrawnLayer, rng: np.random.Generator, batch: int, past: int) -> None:
        self.shape, self.layer, self.rng, self.past, self.heads = shape, layer, rng, past, shape.heads
        self.rows = Rows(batch, 1, torch.full((batch,), past, dtype=torch.int32), torch.zeros(batch, dtype=torch.int32))

    def qkv(self) -> tuple[Sequence[Any], Prepare]:
        hidden, rotary, slots = self._rows(self.shape.hidden), self._rotary(), self._cache()
        cache_results = {tensor.data_ptr(): result_of(tensor) for tensor in (slots.keys, slots.values)}
        pointers = {**self.layer.inputs, **pointers_to(rotary, self.rows), **cache_results}
        rotary_c = NO_ROTARY if rotary is None else rotary.c
        structs = (self.layer.packed.qkv.c, rotary_c, self.heads.c, self.rows.c, slots.c)
        records = [record_of(struct, pointers) for struct in structs]
        n, width = len(hidden), self.heads.query * self.heads.dim

        def prepare(layer: RegionLayer, convert: Convert, rounded: Convert) -> Callable[[], Results]:
            rows, tables = convert(hidden), convert(rotary)
            cache = convert(LayerCache(slots.keys.clone(), slots.values.clone(), self.past))

            def results() -> Results:
                turned = qkv_gemm(rows, layer.qkv, self.heads, tables, self.rows, cache, multiply=_product(rounded))
                return cache.keys, cache.values, *turned

            return results

        return [*records, input_of(hidden), 0, Result((n, width)), Result((n, self.shape.hidden))], prepare

    def attention(self) -> tuple[Sequence[Any], Prepare]:
        queries, slots = self._rows(self.heads.query * self.heads.dim), self._cache()
        params, pointers = self.layer.rows.attention, pointers_to(self.rows, slots)
        structs = (params.c, self.heads.c, self.rows.c, slots.c)
        records = [record_of(struct, pointers) for struct in structs]

        def prepare(layer: RegionLayer, convert: Convert, rounded: Convert) -> Callable[[], Results]:
            rows, cache = convert(queries), convert(slots)
            return lambda: (rounded(attention(rows, params, self.heads, self.rows, cache, all_seen=True)),)

        return [*records, input_of(queries), Result(tuple(queries.shape))], prepare

    def product(self, name: str) -> tuple[Sequence[Any], Prepare]:
        """A product whose bias the next region adds."""
        packed = replace(getattr(self.layer.packed, name), bias=None)
        rows, record = self._rows(packed.inputs), record_of(packed.c, self.layer.inputs)

        def prepare(layer: RegionLayer, convert: Convert, rounded: Convert) -> Callable[[], Results]:
            x, w = convert(rows), replace(getattr(layer, name), bias=None)
            return lambda: (linear(rounded(x), w),)

        return [record, input_of(rows), len(rows), Result((len(rows), packed.outputs))], prepare

    def mlp(self) -> tuple[Sequence[Any], Prepare]:
        hidden, addend, bias = self._rows(self.shape.hidden), self._rows(self.shape.hidden), self._bias()
        packed = self.layer.packed.mlp
        width, n = packed.up.outputs // (2 if packed.gated else 1), len(hidden)
        added = None if bias is None else input_of(bias)
        arguments = [record_of(packed.c, self.layer.inputs), input_of(hidden), input_of(addend), added, 0, n]

        def prepare(layer: RegionLayer, convert: Convert, rounded: Convert) -> Callable[[], Results]:
            rows = convert(hidden), convert(addend), convert(bias)
            return lambda: mlp_gemm(*rows, layer.mlp, multiply=_product(rounded))

        return [*arguments, Result((n, width)), Result((n, self.shape.hidden))], prepare

    def residual(self) -> tuple[Sequence[Any], Prepare]:
        before, mlp_out, bias = self._rows(self.shape.hidden), self._rows(self.shape.hidden), self._bias()
        added = None if bias is None else input_of(bias)
        arguments = [input_of(before), None, None, input_of(mlp_out), added, record_of(NO_NORM.c, {}), *before.shape]

        def prepare(layer: RegionLayer, convert: Convert, rounded: Convert) -> Callable[[], Results]:
            rows = convert(before), convert(mlp_out), convert(bias)
            return lambda: (residual_add(*rows),)

        return [*arguments, Result(tuple(before.shape))], prepare

    def rounded(self, activations: Tensor) -> Tensor:
        """Activations as the kernels may round them."""
        return activations.to(float_dtype(self.layer.dtype)).float()

    def _rows(self, width: int) -> Tensor:
        return drawn_numbers(self.rng, self.rows.batch, width)

    def _bias(self) -> Tensor | None:
        return None if self.shape.llama else drawn_numbers(self.rng, self.shape.hidden)

    def _rotary(self) -> Rotary | None:
        if not self.shape.llama:
            return None
        frequencies = ROTARY_BASE ** (-torch.arange(0, self.heads.dim, 2) / self.heads.dim)
        angles = torch.arange(self.past + 1)[:, None] * frequencies
        return Rotary(angles.cos(), angles.sin(), interleaved=False)

    def _cache(self) -> LayerCache:
        """Random keys and values in all slots, also after the new one."""
        sizes = (
            self.rows.batch,
            self.heads.kv,
            self.past + 1 + int(self.rng.integers(3)),
            padded_head_dim(self.heads.dim),
        )
        keys, values = (drawn_numbers(self.rng, *sizes).to(float_dtype(self.layer.dtype)) for _ in range(2))
        for slots in (keys, values):
            slots[..., self.heads.dim :] = 0
        return LayerCache(keys, values, self.past)


def _same(value: Any) -> Any:
    return value


def _product(rounded: Convert) -> Callable[[Tensor, Linear], Tensor]:
    return lambda rows, matrix: linear(rounded(rows), matrix)
