"""The begin and the end of a decode step in Triton: embedding, logits or tokens, and the state of the next step."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from labkit.stages import Stage

from ..attention.triton_impl import Partials
from ..gemm.triton_impl import codes, gemm, product_arguments, tile_arguments, tile_type
from ..gpu import FEW_ROWS, ONE_PROGRAM, Launcher, optional, padded_rows
from ..plain import argmax_or_minus_one
from ..types import NO_NORM, LayerCache, Linear, Norm, Rotary, Rows
from .triton_kernels import embed, head_argmax, next_step
from .weights import EmbeddingWeights, HeadWeights, ModelWeights

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


class TritonEnds:
    """What a step does before its first layer and after its last."""

    def __init__(self, model: ModelWeights, launch: Launcher) -> None:
        self.model, self.launch = model, launch

    def embed(self, w: EmbeddingWeights, inputs: StepInputs) -> Tensor:
        state, (hidden, spare) = inputs.state, inputs.buffers.hidden
        table = w.packed if w.table is None else _rows_of(w.table)
        assert table is not None
        if w.project_in is None:
            at = w.positions, w.position_offset
            return self._gather(hidden, table, w.norm, state, *at, scale=w.scale, norm_first=w.norm_first)
        embedded = self._gather(inputs.buffers.embedded, table, NO_NORM, state, scale=w.scale)
        residual = None
        if w.positions is not None:
            by_position = StepState(state.positions, state.positions, state.past)  # the table's rows are positions
            residual = self._gather(spare, _rows_of(w.positions), NO_NORM, by_position, begin=w.position_offset)
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
        scale: float = 1.0,
        norm_first: bool = False,
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
            scale=scale,
            eps=norm.eps,
            gain_ptr=optional(norm.weight, out),
            shift_ptr=optional(norm.bias, out),
            E=table.inputs,
            CODES=codes(table),
            POSITIONS=positions is not None,
            NORM=norm.kind,
            SHIFT=norm.bias is not None,
            NORM_FIRST=norm_first,
            BLOCK=triton.next_power_of_2(table.inputs),
        )
        return out

    def head(self, head: HeadWeights, hidden: Tensor, inputs: StepInputs, around: Around, greedy: bool) -> Best | None:
        """The best logits of each program, for `move_on` to choose the next tokens from; None if they are chosen, or
        not to be chosen.
        """
        buffers = inputs.buffers
        with around(Stage.LM_HEAD, None):
            norm = self.model.final_norm
            if head.project_out is not None:
                hidden, norm = gemm(hidden, head.project_out, buffers.projected, self.launch, norm=norm), NO_NORM
            if greedy and len(hidden) <= FEW_ROWS:
                return self._head_argmax(head.matrix, hidden, norm, buffers)
            gemm(hidden, head.matrix, buffers.logits, self.launch, norm=norm, cap=head.cap)
            if greedy:
                inputs.state.tokens.copy_(argmax_or_minus_one(buffers.logits))
            return None

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
            N=head.outputs,
            **product_arguments(hidden, norm, head, head.bias),
            **tile_arguments(len(hidden), head, tile),
        )
        return programs, padded

    def move_on(self, inputs: StepInputs, around: Around, best: Best | None = None) -> None:
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


def _rows_of(table: Tensor) -> Linear:
    return Linear(table, None, table.shape[0], table.shape[1], "rows")
