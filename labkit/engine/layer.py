"""One fused transformer layer, stage by stage.

N rows (tokens of all sequences), H hidden, I intermediate, Hq query heads, D head_dim.
"""

from typing import TypedDict

from torch import Tensor, nn

from labkit.engine.kv_cache import KVCache
from labkit.kernels import LayerWeights, attention, gemm, mlp_gemm, qkv_gemm, residual_add
from labkit.kernels.types import Heads, Rotary, Rows
from labkit.stages import Phase, Stage, stage


class How(TypedDict):
    """What every op is told beside its data."""

    threads: int
    impl: str


class FusedLayer(nn.Module):
    """A layer made of the ops of `labkit.kernels`, each within its stage's range: what profilers see, and what runs
    where no C++ compiler is. Without a profiler the C++ engine runs the same pieces of all layers in one call instead.
    """

    def __init__(
        self, index: int, weights: LayerWeights, heads: Heads, *, parallel: bool, from_norm: bool, impl: str
    ) -> None:
        super().__init__()
        self.index, self.weights, self.heads = index, weights, heads
        self.parallel, self.from_norm, self.impl = parallel, from_norm, impl

    def extra_repr(self) -> str:
        return f"index={self.index}, heads={self.heads.query}/{self.heads.kv}x{self.heads.dim}, impl={self.impl!r}"

    def forward(
        self, hidden_NH: Tensor, rows: Rows, rotary: Rotary | None, cache: KVCache, phase: Phase, threads: int
    ) -> Tensor:
        w, how = self.weights, How(threads=threads, impl=self.impl)
        slots = cache.layer(self.index)
        with stage(phase, Stage.QKV, self.index):
            queries, residual_NH = qkv_gemm(
                hidden_NH, w.qkv, self.heads, rotary, rows, slots, residual_from_norm=self.from_norm, **how
            )
        with stage(phase, Stage.ATTENTION, self.index):
            context = attention(queries, w.attention, self.heads, rows, slots, **how)
        with stage(phase, Stage.ATTN_OUT, self.index):
            attn_out_NH = gemm(context, w.attn_out, **how)
        with stage(phase, Stage.MLP, self.index):
            if self.parallel:
                act_NI, _ = mlp_gemm(hidden_NH, None, None, w.mlp, **how)
            else:
                act_NI, residual_NH = mlp_gemm(
                    residual_NH, attn_out_NH, w.attn_bias, w.mlp, residual_from_norm=self.from_norm, **how
                )
        with stage(phase, Stage.MLP_OUT, self.index):
            mlp_out_NH = gemm(act_NI[:, : w.mlp_out.inputs].contiguous(), w.mlp_out, **how)
        with stage(phase, Stage.RESIDUAL, self.index):
            if self.parallel:
                return residual_add(residual_NH, mlp_out_NH, w.mlp_bias, attn_out_NH, w.attn_bias, **how)
            return residual_add(residual_NH, mlp_out_NH, w.mlp_bias, **how)
