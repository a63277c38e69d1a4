"""One fused transformer layer, stage by stage.

N rows (tokens of all sequences), H hidden, I intermediate, Hq query heads, D head_dim.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol

from torch import Tensor, nn

from labkit.kernels import LayerWeights
from labkit.kernels.layer_ops import LAYER_OPS
from labkit.kernels.types import Heads, LayerCache, Rotary, Rows
from labkit.stages import Phase, Stage, stage

Ops = Mapping[str, Callable[..., Any]]
"""The ops of a layer by name: `labkit.kernels` without the checks, with `threads` and `impl` set."""


@cache
def ops(impl: str, threads: int) -> Ops:
    """Returns the ops of `impl` on `threads` threads."""
    return {layer_op.op: partial(layer_op.trusting, impl=impl, threads=threads) for layer_op in LAYER_OPS}


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


def run_layer(
    ops: Ops,
    w: LayerWeights,
    wiring: Wiring,
    hidden_NH: Tensor,
    rows: Rows,
    rotary: Rotary | None,
    slots: LayerCache,
    around: Callable[[Stage], AbstractContextManager[object]],
) -> Tensor:
    """Runs one layer: hidden [N, H] -> hidden [N, H]. Each stage runs within `around(stage)`."""
    from_norm, add_up = wiring.from_norm, wiring.add_up
    with around(Stage.QKV):
        queries, residual_NH = ops["qkv_gemm"](
            hidden_NH, w.qkv, wiring.heads, rotary, rows, slots, residual_from_norm=from_norm
        )
    with around(Stage.ATTENTION):
        context = ops["attention"](queries, w.attention, wiring.heads, rows, slots)
    with around(Stage.ATTN_OUT):
        attn_out_NH = ops["gemm"](context, w.attn_out)
    if add_up and not wiring.parallel:
        with around(Stage.ALL_REDUCE):
            attn_out_NH = add_up(attn_out_NH)
    with around(Stage.MLP):
        if wiring.parallel:
            act_NI, _ = ops["mlp_gemm"](hidden_NH, None, None, w.mlp.region)
        else:
            act_NI, residual_NH = ops["mlp_gemm"](
                residual_NH, attn_out_NH, w.attn_bias, w.mlp.region, residual_from_norm=from_norm
            )
    with around(Stage.MLP_OUT):
        mlp_out_NH = ops["gemm"](act_NI[:, : w.mlp.out.inputs].contiguous(), w.mlp.out)
        if add_up and wiring.parallel:
            mlp_out_NH += attn_out_NH
    if add_up:
        with around(Stage.ALL_REDUCE):
            mlp_out_NH = add_up(mlp_out_NH)
    with around(Stage.RESIDUAL):
        if wiring.parallel and not add_up:
            return ops["residual_add"](residual_NH, mlp_out_NH, w.mlp.out_bias, attn_out_NH, w.attn_bias)
        return ops["residual_add"](residual_NH, mlp_out_NH, w.mlp.out_bias, mlp_norm=w.mlp.out_norm)


class CacheLayers(Protocol):
    """Keys and values of every layer: a KVCache, or an encoder's storage for one pass."""

    def layer(self, index: int) -> LayerCache: ...


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
        cache: CacheLayers,
        phase: Phase,
        threads: int,
        weights: LayerWeights | None = None,
    ) -> Tensor:
        """Runs the layer. weights: present location of an offloaded layer's weights; None: the layer is resident."""
        return run_layer(
            ops(self.impl, threads),
            weights or self.weights,
            self.wiring,
            hidden_NH,
            rows,
            rotary,
            cache.layer(self.index),
            lambda name: stage(phase, name, self.index),
        )
