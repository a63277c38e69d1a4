"""The regions of a layer in a decode step: kernels that write into the step's buffers and add to the residual."""

from dataclasses import dataclass

from torch import Tensor

from ..attention.triton_impl import attention
from ..gemm.triton_impl import codes, gemm, product_arguments, tile_arguments, tile_type
from ..gpu import FEW_ROWS, Launcher
from ..layer import Sum
from ..mlp_gemm.triton_impl import mlp_arguments, mlp_gemm, mlp_tiles
from ..qkv_gemm.triton_impl import heads_arguments, qkv_gemm, qkv_tiles
from ..residual_add.triton_impl import add_normed
from ..types import LayerCache
from .triton_ends import StepInputs
from .triton_kernels import qkv_and_mlp
from .triton_mixture import TritonMixture
from .weights import LayerWeights, ModelWeights


@dataclass(frozen=True)
class TritonRegions:
    """The regions of one layer. A product adds to the residual in its own kernel, unless its output is normed first:
    that norm needs whole rows, and a product's program has a part of a row.
    """

    weights: LayerWeights
    model: ModelWeights
    launch: Launcher
    inputs: StepInputs
    cache: LayerCache
    hidden: Tensor  # one of the two buffers for the residual stream; the layer overwrites it

    add_up = None

    @property
    def parallel(self) -> bool:
        return self.model.parallel_residual

    @property
    def mixture(self) -> TritonMixture | None:
        return TritonMixture.of(self.weights, self.launch, self.hidden, self.inputs.buffers.act)

    @property
    def joined(self) -> "TritonRegions | None":
        """These regions, if regions 1 and 3 can run in one kernel."""
        if not self.parallel:
            return None
        w, region = self.weights, self.weights.dense.region
        joined = (
            not self.model.residual_from_norm
            and len(self.hidden) <= FEW_ROWS
            and w.qkv.q_norm is None
            and self.cache.key_scales is None
            and w.qkv.norm.kind == region.norm.kind
            and (w.qkv.norm.bias is None) == (region.norm.bias is None)
            and codes(w.qkv.proj) == codes(region.up)
        )
        return self if joined else None

    @property
    def _norms_outputs(self) -> bool:
        return self.weights.mlp.out_norm.kind != "none"

    @property
    def _spare(self) -> Tensor:
        return self.inputs.buffers.spare(self.hidden)

    def qkv(self) -> tuple[Tensor, Tensor]:
        inputs, buffers = self.inputs, self.inputs.buffers
        normed = buffers.residual if self.model.residual_from_norm else None
        heads, w = self.model.heads, self.weights.qkv
        qkv_gemm(self.hidden, w, heads, inputs.rotary, inputs.rows, self.cache, buffers.queries, normed, self.launch)
        return buffers.queries, self.hidden if normed is None else normed

    def attention(self, queries: Tensor) -> Tensor:
        inputs, buffers, w = self.inputs, self.inputs.buffers, self.weights.attention
        context, partials = buffers.context, buffers.partials
        attention(queries, w, self.model.heads, inputs.rows, self.cache, context, self.launch, partials)
        return context

    def attn_out(self, context: Tensor, residual: Tensor) -> Sum:
        w, product = self.weights, self.inputs.buffers.residual
        if self._norms_outputs:
            assert residual is not product, "a residual from a norm lies in the product's buffer"
            return Sum(residual, (gemm(context, w.attn_out, product, self.launch),))
        return Sum(gemm(context, w.attn_out, self._spare, self.launch, bias=w.attn_bias, residual=residual))

    def mlp(self, attended: Sum) -> tuple[Tensor, Sum]:
        buffers, w, from_norm = self.inputs.buffers, self.weights, self.model.residual_from_norm
        region, act = w.dense.region, buffers.act
        if self.parallel:
            mlp_gemm(self.hidden, None, None, region, act, None, self.launch)
            return act, attended
        if attended.products:
            (product,) = attended.products
            mlp_gemm(attended.residual, product, w.attn_bias, region, act, self._spare, self.launch)
            return act, Sum(self._spare)
        normed = buffers.residual if from_norm else None
        mlp_gemm(attended.residual, None, None, region, act, normed, self.launch, residual_from_norm=from_norm)
        return act, attended if normed is None else Sum(normed)

    def mlp_out(self, act: Tensor, onto: Sum) -> Sum:
        w = self.weights.dense
        if self._norms_outputs:
            return Sum(onto.residual, (gemm(act, w.out, self.inputs.buffers.residual, self.launch),))
        return Sum(gemm(act, w.out, self.hidden, self.launch, bias=w.out_bias, residual=onto.residual))

    def residual_add(self, total: Sum) -> Tensor:
        w, (product,) = self.weights.mlp, total.products
        return add_normed(total.residual, product, w.out_bias, w.out_norm, self.hidden, self.launch)

    def qkv_and_mlp(self) -> tuple[Tensor, Tensor]:
        w, launch, inputs, buffers = self.weights, self.launch, self.inputs, self.inputs.buffers
        proj, up, rows = w.qkv.proj, w.dense.region.up, len(self.hidden)
        of_mlp = mlp_arguments(self.hidden, None, None, w.dense.region, None, residual_from_norm=False)
        tile = launch.tile("qkv_and_mlp", tile_type(proj), rows, proj.outputs + up.outputs, proj.inputs)
        programs = qkv_tiles(w.qkv, tile)
        rotary = inputs.rotary and inputs.rotary.table(w.qkv.table)
        launch(
            qkv_and_mlp,
            (programs + mlp_tiles(w.dense.region, tile),),
            tile,
            qkv_programs=programs,
            **heads_arguments(self.model.heads, rotary, inputs.rows, self.cache, buffers.queries),
            **product_arguments(self.hidden, w.qkv.norm, proj, proj.bias),
            act_ptr=buffers.act,
            N=buffers.act.shape[1],
            mlp_eps=of_mlp["eps"],
            **{f"mlp_{name}": of_mlp[name] for name in ("gain_ptr", "shift_ptr", "w_ptr", "scales_ptr", "bias_ptr")},
            MLP_BIAS=of_mlp["BIAS"],
            ACTIVATION=of_mlp["ACTIVATION"],
            GATED=of_mlp["GATED"],
            **tile_arguments(rows, proj, tile),
        )
        return buffers.queries, buffers.act

    def outputs(self, context: Tensor, act: Tensor) -> Tensor:
        w = self.weights
        also = (act, w.dense.out, w.dense.out_bias)
        return gemm(context, w.attn_out, self._spare, self.launch, bias=w.attn_bias, also=also, residual=self.hidden)
