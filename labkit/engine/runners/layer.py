"""One fused transformer layer, op by op.

N rows (tokens of all sequences), H hidden, I intermediate, Hq query heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from labkit.kernels import LayerWeights
from labkit.kernels.decode_step import MixtureMlp
from labkit.kernels.layer import Sum, run_layer
from labkit.kernels.layer_ops import LAYER_OPS, MIXTURE_OPS
from labkit.kernels.types import Heads, LayerCache, Rotary, Rows
from labkit.stages import Phase, stage

Ops = Mapping[str, Callable[..., Any]]
"""The ops of a layer by name: `labkit.kernels` without the checks, with `threads` and `impl` set."""


@cache
def ops(impl: str, threads: int) -> Ops:
    """Returns the ops of `impl` on `threads` threads."""
    all_ops = (*LAYER_OPS, *MIXTURE_OPS)
    return {layer_op.op: partial(layer_op.trusting, impl=impl, threads=threads) for layer_op in all_ops}


@dataclass(frozen=True)
class Wiring:
    """Connections between the ops of a layer.

    parallel: attention and MLP start from the same rows.
    from_norm: the residual is the output of the norm.
    add_up: sums over the ranks of a model; None: there is one rank.
    """

    heads: Heads
    parallel: bool
    from_norm: bool
    add_up: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True)
class Routed:
    """Rows with their experts: normed [N, H], chosen int64 [N, K], shares [N, K]."""

    normed_NH: Tensor
    chosen_NK: Tensor
    shares_NK: Tensor


@dataclass(frozen=True)
class OpMixture:
    """A mixture of experts as ops. attn_bias: of the attention's output."""

    ops: Ops
    weights: MixtureMlp
    attn_bias: Tensor | None

    @property
    def shares_one(self) -> bool:
        return self.weights.shared is not None

    def route(self, attended: Sum) -> tuple[Routed, Sum]:
        residual_NH, (attn_out_NH,) = attended
        normed, residual, *choice = self.ops["route"](residual_NH, attn_out_NH, self.attn_bias, self.weights.router)
        return Routed(normed, *choice), Sum(residual)

    def experts(self, routed: Routed, onto: Sum) -> Sum:
        own = self.weights.own
        here = (routed.chosen_NK >= own.start) & (routed.chosen_NK < own.stop)
        chosen_NK = torch.where(here, routed.chosen_NK - own.start, len(own))  # which stands for no expert
        out = self._mixture(routed, chosen_NK)
        return Sum(onto.residual, (out,))

    def _mixture(self, routed: Routed, chosen_NK: Tensor) -> Tensor:
        experts, none = self.weights.experts, len(self.weights.own)
        if self.weights.stored is None:
            return self.ops["experts"](routed.normed_NH, chosen_NK, routed.shares_NK, experts)
        out = torch.zeros(len(routed.normed_NH), self.weights.hidden)
        wanted = chosen_NK[chosen_NK < none].unique().tolist()
        for wave, placed in self.weights.stored.waves(wanted, experts):
            of_wave_NK = torch.where(torch.isin(chosen_NK, torch.tensor(wave)), chosen_NK, none)
            out += self.ops["experts"](routed.normed_NH, of_wave_NK, routed.shares_NK, placed)
        return out

    def mlp(self, routed: Routed) -> Tensor:
        assert self.weights.shared is not None
        act_NI, _ = self.ops["mlp_gemm"](routed.normed_NH, None, None, self.weights.shared.region)
        return act_NI

    def mlp_out(self, act: Tensor, routed: Routed, onto: Sum) -> Sum:
        (out,), shared, gemm = onto.products, self.weights.shared, self.ops["gemm"]
        assert shared is not None
        beside = gemm(act[:, : shared.out.inputs].contiguous(), shared.out)
        if shared.gate is not None:
            beside *= gemm(routed.normed_NH, shared.gate).sigmoid()
        return Sum(onto.residual, (out + beside,))


@dataclass(frozen=True)
class OpRegions:
    """The regions of one layer as ops, which leave each product for the next region to add."""

    ops: Ops
    weights: LayerWeights
    wiring: Wiring
    hidden_NH: Tensor
    rows: Rows
    rotary: Rotary | None
    slots: LayerCache

    joined = None

    @property
    def parallel(self) -> bool:
        return self.wiring.parallel

    @property
    def add_up(self) -> Callable[[Tensor], Tensor] | None:
        return self.wiring.add_up

    def qkv(self) -> tuple[Tensor, Tensor]:
        wiring, w = self.wiring, self.weights.qkv
        return self.ops["qkv_gemm"](
            self.hidden_NH, w, wiring.heads, self.rotary, self.rows, self.slots, residual_from_norm=wiring.from_norm
        )

    def attention(self, queries: Tensor) -> Tensor:
        return self.ops["attention"](queries, self.weights.attention, self.wiring.heads, self.rows, self.slots)

    def attn_out(self, context: Tensor, residual: Tensor) -> Sum:
        return Sum(residual, (self.ops["gemm"](context, self.weights.attn_out),))

    @property
    def mixture(self) -> OpMixture | None:
        mlp = self.weights.mlp
        return OpMixture(self.ops, mlp, self.weights.attn_bias) if isinstance(mlp, MixtureMlp) else None

    def mlp(self, attended: Sum) -> tuple[Tensor, Sum]:
        w, mlp_gemm = self.weights, self.ops["mlp_gemm"]
        if self.parallel:
            act_NI, _ = mlp_gemm(self.hidden_NH, None, None, w.dense.region)
            return act_NI, attended
        residual_NH, (attn_out_NH,) = attended
        act_NI, residual_NH = mlp_gemm(
            residual_NH, attn_out_NH, w.attn_bias, w.dense.region, residual_from_norm=self.wiring.from_norm
        )
        return act_NI, Sum(residual_NH)

    def mlp_out(self, act: Tensor, onto: Sum) -> Sum:
        out = self.weights.dense.out
        return Sum(onto.residual, (*onto.products, self.ops["gemm"](act[:, : out.inputs].contiguous(), out)))

    def residual_add(self, total: Sum) -> Tensor:
        w, (*attn_outs, mlp_out_NH) = self.weights, total.products
        attention = (attn_outs[0], w.attn_bias) if attn_outs else ()
        return self.ops["residual_add"](total.residual, mlp_out_NH, w.mlp.out_bias, *attention, mlp_norm=w.mlp.out_norm)


class FusedLayer(nn.Module):
    """Layer made of the ops of `labkit.kernels`, each within the range of its stage. It runs under profilers and
    without a C++ compiler. Otherwise the C++ engine runs the same ops of all layers in one call.
    """

    def __init__(self, index: int, weights: LayerWeights, wiring: Wiring, impl: str) -> None:
        super().__init__()
        self.index, self.weights, self.wiring, self.impl = index, weights, wiring, impl

    def extra_repr(self) -> str:
        heads = self.wiring.heads
        return f"index={self.index}, heads={heads.query}/{heads.kv}x{heads.dim}, impl={self.impl!r}"

    def forward(
        self,
        hidden_NH: Tensor,
        rows: Rows,
        rotary: Rotary | None,
        slots: LayerCache,
        phase: Phase,
        threads: int,
        weights: LayerWeights | None = None,
    ) -> Tensor:
        """Runs the layer. weights: present location of an offloaded layer's weights; None: the layer is resident."""
        regions = OpRegions(
            ops(self.impl, threads), weights or self.weights, self.wiring, hidden_NH, rows, rotary, slots
        )
        return run_layer(regions, lambda name: stage(phase, name, self.index))
