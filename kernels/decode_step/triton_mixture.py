"""The mixture of experts of a layer in a decode step on the GPU."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from ..experts.triton_impl import experts
from ..gemm.triton_impl import gemm
from ..gpu import Launcher
from ..layer import Sum
from ..mlp_gemm.triton_impl import mlp_gemm
from ..route.triton_impl import RoutedRows, route
from ..tuned import Tile
from .mlps import MixtureMlp, SharedExpert
from .triton_kernels import add_gated
from .weights import LayerWeights

TILE = Tile(rows=1, depth=1024)


@dataclass(frozen=True)
class TritonMixture:
    """The regions of a mixture. Experts add to the residual in their last kernel, unless the mixture's output is normed
    first: then it is a product for `residual_add`.

    hidden: the buffer that the layer overwrites with its output.
    act: the buffer for activations of the shared expert.
    """

    weights: MixtureMlp
    attn_bias: Tensor | None
    launch: Launcher
    hidden: Tensor
    act: Tensor

    @classmethod
    def of(cls, layer: LayerWeights, launch: Launcher, hidden: Tensor, act: Tensor) -> "TritonMixture | None":
        """The mixture of a layer; None: the layer has an MLP instead."""
        if not isinstance(layer.mlp, MixtureMlp):
            return None
        assert layer.mlp.stored is None, "only the C++ step has a store of experts"
        assert len(layer.mlp.own) == layer.mlp.router.matrix.outputs, "a step on ranks runs op by op"
        return cls(layer.mlp, layer.attn_bias, launch, hidden, act)

    @property
    def shares_one(self) -> bool:
        return self.weights.shared is not None

    def route(self, attended: Sum) -> tuple[RoutedRows, Sum]:
        product, bias = (attended.products[0], self.attn_bias) if attended.products else (None, None)
        choice = route(attended.residual, product, bias, self.weights.router, self.launch)
        return choice, Sum(choice.residual)

    def experts(self, routed: RoutedRows, onto: Sum) -> Sum:
        mlps, (normed, _, chosen, shares) = self.weights.experts, routed
        if self.weights.out_norm.kind == "none":
            return Sum(experts(normed, chosen, shares, mlps, self.hidden, self.launch, onto.residual))
        out = torch.empty_like(self.hidden)
        return Sum(onto.residual, (experts(normed, chosen, shares, mlps, out, self.launch),))

    def mlp(self, routed: RoutedRows) -> Tensor:
        mlp_gemm(routed.normed, None, None, self._shared.region, self.act, None, self.launch)
        return self.act

    def mlp_out(self, act: Tensor, routed: RoutedRows, onto: Sum) -> Sum:
        """Adds the shared expert's output to that of the experts, in place."""
        shared, (total, *_) = self._shared, (*onto.products, onto.residual)
        if shared.gate is None:
            gemm(act, shared.out, total, self.launch, residual=total)
            return onto
        beside, gates = torch.empty_like(total), torch.empty(len(total), 1, device=total.device)
        gemm(act, shared.out, beside, self.launch)
        gemm(routed.normed, shared.gate, gates, self.launch)
        self.launch(
            add_gated,
            (len(total), triton.cdiv(total.shape[1], TILE.depth)),
            TILE,
            total_ptr=total,
            x_ptr=beside,
            gates_ptr=gates,
            H=total.shape[1],
            BLOCK=TILE.depth,
        )
        return onto

    @property
    def _shared(self) -> SharedExpert:
        assert self.weights.shared is not None
        return self.weights.shared
