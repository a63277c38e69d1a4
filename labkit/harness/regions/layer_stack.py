"""The layers of a decode step, unfused and fused, on the same numbers, region by region.

Three sides separate the gain of a better GEMM from the gain of fusion: unfused torch ops with torch's GEMM, the same
ops with labkit's GEMM, and the fused kernels. There are more layers than the caches hold, so each call reads its
weights from memory, as in a decode step; "warm" runs one layer again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from labkit.engine.runners.layer import Ops, ops
from labkit.harness.regions.clocks import Counted, OpCounter
from labkit.harness.regions.layer_side import LayerSide, OneCall
from labkit.harness.regions.random_layers import RandomLayers, gpu_step, random_layers, tensors_of
from labkit.harness.regions.records import LayerCase
from labkit.harness.regions.sides import FUSED, OWN_GEMM, SDPA, UNFUSED
from labkit.harness.regions.vocabulary import OPS
from labkit.kernels import LayerWeights
from labkit.kernels.checks import unchecked
from labkit.kernels.gemm import gemm
from labkit.kernels.layer_ops import Multiply
from labkit.kernels.plain import linear
from labkit.kernels.types import AttentionParams, Heads, LayerCache, Rows
from labkit.models.config import ModelConfig
from labkit.models.dtypes import dtype_of
from labkit.stages import Stage


@dataclass(frozen=True)
class LayerStack:
    """The layers of a case and all sides that run them."""

    config: ModelConfig  # of these layers
    case: LayerCase
    sides: tuple[LayerSide, ...]
    one_call: OneCall | None  # None for impl "triton"
    gpu_step: Callable[[], object] | None  # None for other impls

    def side(self, name: str) -> LayerSide:
        return next(side for side in self.sides if side.name == name)

    @property
    def tensors(self) -> list[Tensor]:
        """Weights and caches of all sides."""
        return tensors_of([(side.layers, side.caches) for side in self.sides])

    def with_fused(self, regions: Container[Stage]) -> LayerSide:
        """The unfused side with these regions fused. Rows are converted where a region computes in another type.

        All regions of the same op are fused together.
        """
        slow, fast = self.side(UNFUSED), self.side(FUSED)
        fused = {layer_op.op for region, layer_op in OPS.items() if region in regions}
        pairs = zip(slow.layers, fast.layers, strict=True)
        layers = tuple(_mixed(*pair, fused, parallel=slow.wiring.parallel) for pair in pairs)
        convert = slow.hidden_NH.dtype != torch.float32

        def op(name: str) -> Callable[..., Any]:
            side = fast if name in fused else slow
            return _converting(side.ops[name], side.hidden_NH.dtype) if convert else side.ops[name]

        mixed = {layer_op.op: op(layer_op.op) for layer_op in OPS.values()}
        rotary = fast.rotary if OPS[Stage.QKV].op in fused else slow.rotary
        return replace(slow, name="partly fused", ops=mixed, layers=layers, rotary=rotary)

    def counted(self) -> dict[Stage, Counted]:
        """The torch ops of one layer of the unfused sequence, by region."""
        side = replace(self.side(UNFUSED), layers=self.side(UNFUSED).layers[:1])
        counter = OpCounter()
        with torch.no_grad(), counter:
            side.step(counter.around)
        return dict(counter.regions)


def layer_stack(config: ModelConfig, case: LayerCase) -> LayerStack:
    """Random layers of `case` with the shape of `config`, the same for all sides."""
    torch.set_num_threads(case.threads)
    layers = random_layers(config, case, dtype_of(case.dtype))
    all_seen = all(window is None or window > case.context for window in layers.config.windows)
    vanilla = _unfused(linear, all_seen=all_seen)
    fast = ops(case.impl, case.threads)
    own_gemm = {
        **_unfused(partial(unchecked(gemm), threads=case.threads, impl=case.impl), all_seen=all_seen),
        **{name: fast[name] for name in ("attention", "residual_add")},
    }
    sides = [
        _side(UNFUSED, vanilla, layers.plain, layers, native=True),
        _side(OWN_GEMM, own_gemm, layers.own_gemm, layers),
        _side(FUSED, fast, layers.fused.layers, layers),
    ]
    if all_seen and config.position != "alibi" and config.attention_cap is None and not config.attention_sinks:
        sides.append(replace(sides[0], name=SDPA, ops={**vanilla, "attention": _sdpa}))
    one_call = OneCall(layers, case.threads) if case.impl == "cpp" else None
    on_gpu = gpu_step(layers) if case.impl == "triton" else None
    return LayerStack(layers.config, case, tuple(sides), one_call, on_gpu)


def _side(
    name: str, ops: Ops, weights: tuple[LayerWeights, ...], layers: RandomLayers, *, native: bool = False
) -> LayerSide:
    """A side with its own weights on the shared rows; if `native`, in the type in which torch's ops compute."""
    hidden = layers.hidden_NH.to(layers.plain_dtype) if native else layers.hidden_NH
    rotary = layers.plain_rotary if native else layers.rotary
    return LayerSide(name, ops, weights, layers.wiring, hidden, layers.rows, rotary, layers.slots)


def _unfused(multiply: Multiply, *, all_seen: bool) -> Ops:
    """The references of all ops, with this product. `all_seen`: no window hides tokens, so attention needs no mask."""
    references = {layer_op.op: layer_op.unfused(multiply) for layer_op in OPS.values()}
    return {**references, "attention": partial(references["attention"], all_seen=all_seen)}


def _mixed(plain: LayerWeights, packed: LayerWeights, fused: Container[str], *, parallel: bool) -> LayerWeights:
    """`plain`, but with the weights of the ops in `fused` taken from `packed`."""
    reads = {name: layer_op.op for layer_op in OPS.values() for name in layer_op.weights}
    reads["attn_bias"] = OPS[Stage.RESIDUAL if parallel else Stage.MLP].op
    names = [name for name, op in reads.items() if op in fused]
    of_mlp = [name.removeprefix("mlp.") for name in names if name.startswith("mlp.")]
    mlp = replace(plain.mlp, **{name: getattr(packed.mlp, name) for name in of_mlp})
    of_layer = {name: getattr(packed, name) for name in names if not name.startswith("mlp.")}
    return replace(plain, mlp=mlp, **of_layer)


def _converting(op: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    """`op`, with its tensors converted to `dtype` first."""
    return lambda *args, **kwargs: op(*(arg.to(dtype) if isinstance(arg, Tensor) else arg for arg in args), **kwargs)


def _sdpa(queries: Tensor, params: AttentionParams, heads: Heads, rows: Rows, cache: LayerCache) -> Tensor:
    """Attention of a decode step by torch's own fused op, its strongest baseline."""
    total = cache.past + rows.tokens
    q = queries.view(rows.batch, rows.tokens, heads.query, heads.dim).transpose(1, 2)
    k, v = (part[:, :, :total, : heads.dim] for part in (cache.keys, cache.values))
    context = F.scaled_dot_product_attention(q, k, v, scale=params.scale, enable_gqa=heads.query > heads.kv)
    return context.transpose(1, 2).reshape(len(queries), -1)
