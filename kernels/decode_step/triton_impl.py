"""A decode step in Triton: five kernels per layer, three if attention and MLP start from the same rows, and seven if
outputs are normed before they are added to the residual.

Everything that changes from step to step (token, slot, position) is in tensors on the device. The last kernel of a step
writes them for the next step, so that a recorded step, a CUDA graph, can be replayed.
"""

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from labkit.stages import Stage

from ..attention.triton_impl import attention
from ..cache_stream import CachePass
from ..gemm.triton_impl import codes, gemm, product_arguments, tile_arguments, tile_type
from ..gpu import FEW_ROWS, Launcher
from ..mlp_gemm.triton_impl import mlp_arguments, mlp_gemm, mlp_tiles
from ..plain import normalise
from ..qkv_gemm.triton_impl import heads_arguments, qkv_gemm, qkv_tiles
from ..residual_add.triton_impl import add_normed
from ..types import LayerCache, check_heads
from . import StreamedLayers
from .triton_ends import Around, Buffers, StepInputs, TritonEnds
from .triton_kernels import qkv_and_mlp
from .weights import LayerWeights, ModelWeights


class TritonStep:
    """One token for each of B sequences, through a range of layers: from the embedding, or from rows, to the next token
    or the logits, or to rows without a head.

    streamed: layers that pass through the slots of a stream; None: all layers are resident.
    """

    def __init__(self, model: ModelWeights, launch: Launcher, streamed: StreamedLayers | None = None) -> None:
        check_heads(model.heads, "triton")
        self.model, self.launch, self.streamed = model, launch, streamed
        self.ends = TritonEnds(model, launch)

    def __call__(self, inputs: StepInputs, around: Around, *, greedy: bool, kv_pass: CachePass | None = None) -> Tensor:
        """Returns the chosen tokens, `state.tokens`, or logits float32 [B, V]; without a head rows float32 [B, H]. Keys
        and values go to slot `state.past`.

        Each stage is launched within `around(stage, layer)`. kv_pass: a pass over offloaded keys and values, which are
        in `caches` at their layer's turn; None: all are resident.
        """
        w, hidden = self.model, inputs.buffers.given
        if w.embedding is not None:
            with around(Stage.EMBED, None):
                hidden = self.ends.embed(w.embedding, inputs)
        first_turn = self.streamed.stream.begin_pass() if self.streamed else 0
        for index, (layer, cache) in enumerate(zip(w.layers, inputs.caches, strict=True)):
            run = self._parallel_layer if self._joins(layer, len(hidden), cache) else self._layer
            fetched = nullcontext() if kv_pass is None else kv_pass.resident(index, around(Stage.FETCH_KV, index))
            with self._in_memory(index, layer, first_turn, around) as resident, fetched:
                hidden = run(resident, index, hidden, inputs, around)
        if w.head is None:
            self.ends.move_on(inputs, around)
            return normalise(w.final_norm, hidden)
        best = self.ends.head(w.head, hidden, inputs, around, greedy)
        self.ends.move_on(inputs, around, best)
        return inputs.state.tokens if greedy else inputs.buffers.logits

    def _in_memory(
        self, index: int, layer: LayerWeights, first_turn: int, around: Around
    ) -> AbstractContextManager[LayerWeights]:
        if self.streamed is None:
            return nullcontext(layer)
        return self.streamed.resident(index, layer, first_turn, around(Stage.FETCH, index))

    def _layer(self, w: LayerWeights, index: int, hidden: Tensor, inputs: StepInputs, around: Around) -> Tensor:
        """Five kernels: the two output products also add to the residual. Two more for normed outputs."""
        launch, from_norm = self.launch, self.model.residual_from_norm
        buffers, rows, cache = inputs.buffers, inputs.rows, inputs.caches[index]
        parallel = self.model.parallel_residual
        residual = buffers.residual if from_norm else hidden
        spare = buffers.spare(hidden)
        with around(Stage.QKV, index):
            to = residual if from_norm else None
            qkv_gemm(hidden, w.qkv, self.model.heads, inputs.rotary, rows, cache, buffers.queries, to, launch)
        with around(Stage.ATTENTION, index):
            self._attention(w, index, inputs)
        if w.mlp.out_norm.kind != "none":
            return self._normed_outputs(w, index, hidden, buffers, around)
        with around(Stage.ATTN_OUT, index):
            added = gemm(buffers.context, w.attn_out, spare, launch, bias=w.attn_bias, residual=residual)
        with around(Stage.MLP, index):
            if parallel:
                mlp_gemm(hidden, None, None, w.mlp.region, buffers.act, None, launch)
            else:
                to = buffers.residual if from_norm else None
                mlp_gemm(added, None, None, w.mlp.region, buffers.act, to, launch, residual_from_norm=from_norm)
        with around(Stage.MLP_OUT, index):
            residual = buffers.residual if from_norm and not parallel else added
            return gemm(buffers.act, w.mlp.out, hidden, launch, bias=w.mlp.out_bias, residual=residual)

    def _normed_outputs(self, w: LayerWeights, index: int, hidden: Tensor, buffers: Buffers, around: Around) -> Tensor:
        """The layer after its attention. The norm of an output needs whole rows, and a product's program has a part."""
        launch, out, added = self.launch, buffers.residual, buffers.spare(hidden)
        with around(Stage.ATTN_OUT, index):
            gemm(buffers.context, w.attn_out, out, launch)
        with around(Stage.MLP, index):
            mlp_gemm(hidden, out, w.attn_bias, w.mlp.region, buffers.act, added, launch)
        with around(Stage.MLP_OUT, index):
            gemm(buffers.act, w.mlp.out, out, launch)
        with around(Stage.RESIDUAL, index):
            return add_normed(added, out, w.mlp.out_bias, w.mlp.out_norm, hidden, launch)

    def _attention(self, w: LayerWeights, index: int, inputs: StepInputs) -> None:
        buffers, cache = inputs.buffers, inputs.caches[index]
        queries, context, partials = buffers.queries, buffers.context, buffers.partials
        attention(queries, w.attention, self.model.heads, inputs.rows, cache, context, self.launch, partials)

    def _joins(self, w: LayerWeights, rows: int, cache: LayerCache) -> bool:
        """Whether regions 1 and 3 of the layer can run in one kernel."""
        return (
            self.model.parallel_residual
            and not self.model.residual_from_norm
            and rows <= FEW_ROWS
            and w.qkv.q_norm is None
            and cache.key_scales is None
            and w.qkv.norm.kind == w.mlp.region.norm.kind
            and (w.qkv.norm.bias is None) == (w.mlp.region.norm.bias is None)
            and codes(w.qkv.proj) == codes(w.mlp.region.up)
        )

    def _parallel_layer(
        self, w: LayerWeights, index: int, hidden: Tensor, inputs: StepInputs, around: Around
    ) -> Tensor:
        """Three kernels: regions 1 and 3 together, attention, and both output products with the residual."""
        launch, buffers, out = self.launch, inputs.buffers, inputs.buffers.spare(hidden)
        with around(Stage.QKV_MLP, index):
            self._qkv_and_mlp(w, index, hidden, inputs)
        with around(Stage.ATTENTION, index):
            self._attention(w, index, inputs)
        with around(Stage.OUTPUTS, index):
            also = (buffers.act, w.mlp.out, w.mlp.out_bias)
            return gemm(buffers.context, w.attn_out, out, launch, bias=w.attn_bias, also=also, residual=hidden)

    def _qkv_and_mlp(self, w: LayerWeights, index: int, hidden: Tensor, inputs: StepInputs) -> None:
        proj, up, buffers, cache = w.qkv.proj, w.mlp.region.up, inputs.buffers, inputs.caches[index]
        of_heads = heads_arguments(self.model.heads, inputs.rotary, inputs.rows, cache, buffers.queries)
        of_qkv = product_arguments(hidden, w.qkv.norm, proj, proj.bias)
        of_mlp = mlp_arguments(hidden, None, None, w.mlp.region, None, residual_from_norm=False)
        tile = self.launch.tile("qkv_and_mlp", tile_type(proj), len(hidden), proj.outputs + up.outputs, proj.inputs)
        programs = qkv_tiles(w.qkv, tile)
        self.launch(
            qkv_and_mlp,
            (programs + mlp_tiles(w.mlp.region, tile),),
            tile,
            qkv_programs=programs,
            **of_heads,
            **of_qkv,
            act_ptr=buffers.act,
            N=buffers.act.shape[1],
            mlp_eps=of_mlp["eps"],
            **{f"mlp_{name}": of_mlp[name] for name in ("gain_ptr", "shift_ptr", "w_ptr", "scales_ptr", "bias_ptr")},
            MLP_BIAS=of_mlp["BIAS"],
            ACTIVATION=of_mlp["ACTIVATION"],
            GATED=of_mlp["GATED"],
            **tile_arguments(len(hidden), proj, tile),
        )
