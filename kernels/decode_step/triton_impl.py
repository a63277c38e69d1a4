"""A decode step in Triton: five kernels per layer, or three if attention and MLP start from the same rows.

Everything that changes from step to step (token, slot, position) is in tensors on the device. The last kernel of a step
writes them for the next step, so that a recorded step, a CUDA graph, can be replayed.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from labkit.stages import Stage

from ..attention.triton_impl import Partials, attention
from ..cache_stream import CachePass
from ..gemm.triton_impl import codes, gemm, tile_type
from ..gpu import FEW_ROWS, Launcher, dot_type, optional, padded_rows
from ..mlp_gemm.triton_impl import mlp_arguments, mlp_gemm, mlp_tiles
from ..plain import argmax_or_minus_one, normalise
from ..qkv_gemm.triton_impl import heads_arguments, qkv_arguments, qkv_gemm, qkv_tiles
from ..tuned import Tile
from ..types import LayerCache, Linear, Norm, Rotary, Rows, check_heads
from . import StreamedLayers
from .triton_kernels import embed, head_argmax, next_step, qkv_and_mlp
from .weights import EmbeddingWeights, HeadWeights, LayerWeights, ModelWeights

PLAIN = Norm()
ONE_PROGRAM = Tile(rows=1, depth=1024, warps=8)
LEAST_ROWS = 4  # of a tile
Best = tuple[int, int]  # (number of programs that wrote their largest logits, padded rows of each)
Around = Callable[[Stage, int | None], AbstractContextManager[object]]  # the context of a stage and its layer


@dataclass(frozen=True)
class StepState:
    """The state that a step reads and advances, on the device."""

    tokens: Tensor  # int64 [B]
    positions: Tensor  # int32 [B]
    past: Tensor  # int32 [1]


class Buffers:
    """The activations of a step for B sequences. Kernels write them, and later kernels read them."""

    def __init__(self, model: ModelWeights, batch: int, device: torch.device) -> None:
        stored = model.cache_dtype
        embedding, head = model.embedding, model.head
        width, vocabulary = model.heads.query * model.heads.dim, head.matrix.outputs if head else 0

        def rows(columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(batch, columns, dtype=dtype, device=device)

        self.embedded = rows(embedding.size if embedding else 0)
        self.hidden = (rows(model.hidden), rows(model.hidden))
        self.residual = rows(model.hidden)
        self.queries, self.context = rows(width, stored), rows(width, stored)
        self.act = rows(model.intermediate, stored)
        self.projected = rows(head.matrix.inputs if head else 0)
        self.logits = rows(vocabulary)
        self.partials = Partials.of(batch, model.heads, device)
        most_programs = max(1, triton.cdiv(vocabulary, LEAST_ROWS))
        self.best = torch.empty(most_programs * FEW_ROWS, device=device)
        self.where = torch.empty(most_programs * FEW_ROWS, dtype=torch.int32, device=device)

    @property
    def given(self) -> Tensor:
        """float32 [B, H]: the input rows of layers without an embedding. A step overwrites them."""
        return self.hidden[0]

    def spare(self, hidden: Tensor) -> Tensor:
        """The other one of the two buffers for the residual stream."""
        first, second = self.hidden
        return second if hidden is first else first


@dataclass(frozen=True)
class StepInputs:
    """All tensors of a step, on the device. `rows.positions` must be `state.positions`."""

    state: StepState
    buffers: Buffers
    rows: Rows
    rotary: Rotary | None
    caches: list[LayerCache]


class TritonStep:
    """One token for each of B sequences, through a range of layers: from the embedding, or from rows, to the next token
    or the logits, or to rows without a head.

    streamed: layers that pass through the slots of a stream; None: all layers are resident.
    """

    def __init__(self, model: ModelWeights, launch: Launcher, streamed: StreamedLayers | None = None) -> None:
        check_heads(model.heads, "triton")
        self.model, self.launch, self.streamed = model, launch, streamed

    def __call__(self, inputs: StepInputs, around: Around, *, greedy: bool, kv_pass: CachePass | None = None) -> Tensor:
        """Returns the chosen tokens, `state.tokens`, or logits float32 [B, V]; without a head rows float32 [B, H]. Keys
        and values go to slot `state.past`.

        Each stage is launched within `around(stage, layer)`. kv_pass: a pass over offloaded keys and values, which are
        in `caches` at their layer's turn; None: all are resident.
        """
        w, hidden = self.model, inputs.buffers.given
        if w.embedding is not None:
            with around(Stage.EMBED, None):
                hidden = self._embed(w.embedding, inputs)
        first_turn = self.streamed.stream.begin_pass() if self.streamed else 0
        for index, (layer, cache) in enumerate(zip(w.layers, inputs.caches, strict=True)):
            run = self._parallel_layer if self._joins(layer, len(hidden), cache) else self._layer
            fetched = nullcontext() if kv_pass is None else kv_pass.at_hand(index, around(Stage.FETCH_KV, index))
            with self._in_memory(index, layer, first_turn, around) as resident, fetched:
                hidden = run(resident, index, hidden, inputs, around)
        if w.head is None:
            self._move_on(inputs, around)
            return normalise(w.final_norm, hidden)
        best = self._head(w.head, hidden, inputs, around, greedy)
        self._move_on(inputs, around, best)
        return inputs.state.tokens if greedy else inputs.buffers.logits

    def _head(self, head: HeadWeights, hidden: Tensor, inputs: StepInputs, around: Around, greedy: bool) -> Best | None:
        """The best logits of each program, for `_move_on` to choose the next tokens from; None if they are chosen, or
        not to be chosen.
        """
        buffers = inputs.buffers
        with around(Stage.LM_HEAD, None):
            norm = self.model.final_norm
            if head.project_out is not None:
                hidden, norm = gemm(hidden, head.project_out, buffers.projected, self.launch, norm=norm), PLAIN
            if greedy and len(hidden) <= FEW_ROWS:
                return self._head_argmax(head.matrix, hidden, norm, buffers)
            gemm(hidden, head.matrix, buffers.logits, self.launch, norm=norm)
            if greedy:
                inputs.state.tokens.copy_(argmax_or_minus_one(buffers.logits))
            return None

    def _move_on(self, inputs: StepInputs, around: Around, best: Best | None = None) -> None:
        """Advances slot and positions; with `best` also the tokens."""
        state, buffers, (programs, padded) = inputs.state, inputs.buffers, best or (0, 1)
        batch = len(state.positions)
        with around(Stage.SAMPLE, None):
            self.launch(
                next_step,
                (1,),
                ONE_PROGRAM,
                tokens_ptr=state.tokens,
                past_ptr=state.past,
                positions_ptr=state.positions,
                best_ptr=buffers.best,
                where_ptr=buffers.where,
                programs=programs,
                M=batch,
                CHOOSE=best is not None,
                MB=triton.next_power_of_2(batch),
                MP=padded,
                BLOCK=2048 if padded == 1 else 256,
            )

    def _in_memory(
        self, index: int, layer: LayerWeights, first_turn: int, around: Around
    ) -> AbstractContextManager[LayerWeights]:
        if self.streamed is None:
            return nullcontext(layer)
        return self.streamed.at_hand(index, layer, first_turn, around(Stage.FETCH, index))

    def _embed(self, w: EmbeddingWeights, inputs: StepInputs) -> Tensor:
        state, (hidden, spare) = inputs.state, inputs.buffers.hidden
        table = w.packed if w.table is None else _rows_of(w.table)
        assert table is not None
        if w.project_in is None:
            return self._gather(hidden, table, w.norm, state, w.positions, w.position_offset)
        embedded = self._gather(inputs.buffers.embedded, table, w.norm, state)
        residual = None
        if w.positions is not None:
            at = StepState(state.positions, state.positions, state.past)
            residual = self._gather(spare, _rows_of(w.positions), PLAIN, at, begin=w.position_offset)
        return gemm(embedded, w.project_in, hidden, self.launch, residual=residual)

    def _gather(
        self,
        out: Tensor,
        table: Linear,
        norm: Norm,
        state: StepState,
        positions: Tensor | None = None,
        offset: int = 0,
        begin: int = 0,
    ) -> Tensor:
        self.launch(
            embed,
            (len(out),),
            ONE_PROGRAM,
            out_ptr=out,
            table_ptr=table.on_gpu,
            scales_ptr=optional(table.scales, out),
            tokens_ptr=state.tokens,
            begin=begin,
            position_table_ptr=optional(positions, out),
            positions_ptr=state.positions,
            offset=offset,
            eps=norm.eps,
            gain_ptr=optional(norm.weight, out),
            shift_ptr=optional(norm.bias, out),
            E=table.inputs,
            CODES=codes(table),
            POSITIONS=positions is not None,
            NORM=norm.kind,
            SHIFT=norm.bias is not None,
            BLOCK=triton.next_power_of_2(table.inputs),
        )
        return out

    def _layer(self, w: LayerWeights, index: int, hidden: Tensor, inputs: StepInputs, around: Around) -> Tensor:
        """Five kernels: the two output products also add to the residual."""
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
        with around(Stage.ATTN_OUT, index):
            added = gemm(buffers.context, w.attn_out, spare, launch, bias=w.attn_bias, residual=residual)
        with around(Stage.MLP, index):
            if parallel:
                mlp_gemm(hidden, None, None, w.mlp, buffers.act, None, launch)
            else:
                to = buffers.residual if from_norm else None
                mlp_gemm(added, None, None, w.mlp, buffers.act, to, launch, residual_from_norm=from_norm)
        with around(Stage.MLP_OUT, index):
            residual = buffers.residual if from_norm and not parallel else added
            return gemm(buffers.act, w.mlp_out, hidden, launch, bias=w.mlp_bias, residual=residual)

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
            and w.qkv.norm.kind == w.mlp.norm.kind
            and (w.qkv.norm.bias is None) == (w.mlp.norm.bias is None)
            and codes(w.qkv.proj) == codes(w.mlp.up)
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
            also = (buffers.act, w.mlp_out, w.mlp_bias)
            return gemm(buffers.context, w.attn_out, out, launch, bias=w.attn_bias, also=also, residual=hidden)

    def _qkv_and_mlp(self, w: LayerWeights, index: int, hidden: Tensor, inputs: StepInputs) -> None:
        proj, up, buffers, cache = w.qkv.proj, w.mlp.up, inputs.buffers, inputs.caches[index]
        of_heads = heads_arguments(self.model.heads, inputs.rotary, inputs.rows, cache, buffers.queries)
        of_qkv = qkv_arguments(hidden, w.qkv, None)
        of_mlp = mlp_arguments(hidden, None, None, w.mlp, None, residual_from_norm=False)
        tile = self.launch.tile("qkv_and_mlp", tile_type(proj), len(hidden), proj.outputs + up.outputs, proj.inputs)
        programs = qkv_tiles(w.qkv, tile)
        for name in ("residual_ptr", "RESIDUAL"):
            del of_qkv[name]
        self.launch(
            qkv_and_mlp,
            (programs + mlp_tiles(w.mlp, tile),),
            tile,
            qkv_programs=programs,
            M=len(hidden),
            **of_heads,
            **of_qkv,
            act_ptr=buffers.act,
            N=buffers.act.shape[1],
            mlp_eps=of_mlp["eps"],
            **{f"mlp_{name}": of_mlp[name] for name in ("gain_ptr", "shift_ptr", "w_ptr", "scales_ptr", "bias_ptr")},
            MLP_BIAS=of_mlp["BIAS"],
            ACTIVATION=of_mlp["ACTIVATION"],
            GATED=of_mlp["GATED"],
            BN=tile.rows,
            BK=tile.depth,
            MP=padded_rows(len(hidden)),
            DOT=dot_type(proj.weight.dtype),
        )

    def _head_argmax(self, head: Linear, hidden: Tensor, norm: Norm, buffers: Buffers) -> Best:
        tile = self.launch.tile("head_argmax", tile_type(head), len(hidden), head.outputs, head.inputs)
        programs, padded = triton.cdiv(head.outputs, tile.rows), padded_rows(len(hidden))
        assert programs * padded <= len(buffers.best), f"tiles of {tile.rows} rows are too small for this kernel"
        self.launch(
            head_argmax,
            (programs,),
            tile,
            best_ptr=buffers.best,
            where_ptr=buffers.where,
            M=len(hidden),
            N=head.outputs,
            eps=norm.eps,
            gain_ptr=optional(norm.weight, hidden),
            shift_ptr=optional(norm.bias, hidden),
            x_ptr=hidden,
            w_ptr=head.on_gpu,
            scales_ptr=optional(head.scales, hidden),
            bias_ptr=optional(head.bias, hidden),
            NORM=norm.kind,
            SHIFT=norm.bias is not None,
            K=head.inputs,
            CODES=codes(head),
            BIAS=head.bias is not None,
            BN=tile.rows,
            BK=tile.depth,
            MP=padded,
            DOT=dot_type(head.weight.dtype),
        )
        return programs, padded


def _rows_of(table: Tensor) -> Linear:
    return Linear(table, None, table.shape[0], table.shape[1], "rows")
