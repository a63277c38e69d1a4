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
"""The ops of a layer by name: those of `labkit.kernels` without their checks, and with `threads` and `impl` set."""


@cache
def ops(impl: str, threads: int) -> Ops:
    """The ops as `impl` on `threads` threads."""
    return {each.op: partial(each.trusting, impl=impl, threads=threads) for each in LAYER_OPS}


@dataclass(frozen=True)
class Wiring:
    """How the ops of a layer are connected. `parallel`: attention and MLP start from the same rows; `from_norm`: the
    residual is what comes out of the norm; `add_up`: the sum over the ranks of a model, None where there is one.
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
    """hidden [N, H] -> hidden [N, H]; each stage runs within `around(stage)`."""
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
            act_NI, _ = ops["mlp_gemm"](hidden_NH, None, None, w.mlp)
        else:
            act_NI, residual_NH = ops["mlp_gemm"](
                residual_NH, attn_out_NH, w.attn_bias, w.mlp, residual_from_norm=from_norm
            )
    with around(Stage.MLP_OUT):
        mlp_out_NH = ops["gemm"](act_NI[:, : w.mlp_out.inputs].contiguous(), w.mlp_out)
        if add_up and wiring.parallel:
            mlp_out_NH += attn_out_NH
    if add_up:
        with around(Stage.ALL_REDUCE):
            mlp_out_NH = add_up(mlp_out_NH)
    with around(Stage.RESIDUAL):
        if wiring.parallel and not add_up:
            return ops["residual_add"](residual_NH, mlp_out_NH, w.mlp_bias, attn_out_NH, w.attn_bias)
        return ops["residual_add"](residual_NH, mlp_out_NH, w.mlp_bias)


class CacheLayers(Protocol):
    """Where keys and values of every layer go: a KVCache, or what an encoder needs for one pass."""

    def layer(self, index: int) -> LayerCache: ...


class FusedLayer(nn.Module):
    """A layer made of the ops of `labkit.kernels`, each within its stage's range: what profilers see, and what runs
    where no C++ compiler is. Without a profiler the C++ engine runs the same pieces of all layers in one call instead.
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
        """weights: where they are now, of a layer that is read from a file; None: where they always are."""
        return run_layer(
            ops(self.impl, threads),
            weights or self.weights,
            self.wiring,
            hidden_NH,
            rows,
            rotary,
            cache.layer(self.index),
            lambda what: stage(phase, what, self.index),
        )
