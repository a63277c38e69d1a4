"""Runs a step op by op, under the ranges of its stages: for profilers, for hidden states, and without a compiler."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from labkit.engine.memory.kv_cache import KVCache
from labkit.engine.runners.layer import FusedLayer, Wiring
from labkit.engine.runners.layer_range import LayerRange
from labkit.engine.runners.runner import Runner
from labkit.engine.runners.stage_clock import StageClock
from labkit.engine.runners.step import Chunk, StepInput, StepOutput, joined, written
from labkit.engine.team_size import team_size
from labkit.kernels import gemm as checked_gemm
from labkit.kernels.cache_stream import CachePass
from labkit.kernels.checks import unchecked
from labkit.kernels.decode_step import EmbeddingWeights, HeadWeights, LayerWeights
from labkit.kernels.gemm import unpack_rows as checked_unpack_rows
from labkit.kernels.plain import argmax_or_minus_one, normalise, soft_capped
from labkit.kernels.slot_stream import Checked, require_whole
from labkit.kernels.types import LayerCache, Rows
from labkit.stages import Phase, Stage, stage

gemm, unpack_rows = unchecked(checked_gemm), unchecked(checked_unpack_rows)


class StagedRunner(Runner):
    """Runs the steps of a layer range with the ops of `labkit.kernels`, each within the range of its stage.

    layers: modules that replace the layers of the original model.
    """

    def __init__(self, layer_range: LayerRange) -> None:
        super().__init__(layer_range, StageClock(0, ()))
        w, ranks = layer_range.weights, layer_range.ranks
        wiring = Wiring(w.heads, w.parallel_residual, w.residual_from_norm, ranks.sum if ranks else None)
        self.layers = [FusedLayer(index, layer, wiring, layer_range.impl) for index, layer in enumerate(w.layers)]

    def _begin(self, step: StepInput) -> StepOutput:
        seen: list[Tensor] = []
        parts = self.layer_range.results(step, lambda chunks: self._run(step, chunks, seen))
        if self.layer_range.weights.head is None:
            return StepOutput(None, tuple(seen), joined(parts))
        return StepOutput(joined(parts), tuple(seen))

    def _run(self, step: StepInput, chunks: list[Chunk], seen: list[Tensor]) -> list[Tensor | None]:
        """Returns the result of each chunk. Appends the hidden states of the only chunk to `seen`, if requested."""
        layer_range, threads = self.layer_range, team_size()
        chunks, rotary = layer_range.rotated(chunks, step.cache)
        hidden = [self._first_rows(chunk) for chunk in chunks]
        counters = [_counter(step.cache, chunk.past, alone=len(chunks) == 1) for chunk in chunks]
        first_turn = layer_range.streamed.stream.begin_pass() if layer_range.streamed else 0
        if (store := layer_range.weights.expert_store) is not None:
            store.begin_pass()
        kv_pass = step.cache.begin_pass(written(step.cache, chunks))
        for layer in self.layers:
            if step.hidden_states:  # the next layer begins with a post-norm layer's last norm, so apply it here
                norm, rows = layer.weights.qkv.norm, chunks[0].rows
                shown = hidden[0] if layer_range.config.pre_norm else normalise(norm, hidden[0])
                seen.append(shown.view(rows.batch, rows.tokens, -1))
            phase = chunks[0].phase
            with (
                self._weights(layer, first_turn, phase) as weights,
                _keys_and_values(step.cache, kv_pass, layer.index, phase) as slots,
            ):
                for at, chunk in enumerate(chunks):  # each has its own write position
                    counter = slots.counter if counters[at] is None else counters[at]
                    placed = replace(slots, past=chunk.past, counter=counter)
                    hidden[at] = layer(hidden[at], chunk.rows, rotary, placed, chunk.phase, threads, weights)
        self._require_layers(kv_pass)
        return [self._result(step, chunk, rows_NH, seen) for chunk, rows_NH in zip(chunks, hidden, strict=True)]

    def _weights(self, layer: FusedLayer, first_turn: int, phase: Phase) -> AbstractContextManager[LayerWeights]:
        """Context with a layer's resident weights."""
        streamed = self.layer_range.streamed
        if streamed is None:
            return nullcontext(layer.weights)
        return streamed.resident(layer.index, layer.weights, first_turn, stage(phase, Stage.FETCH, layer.index))

    def _require_layers(self, kv_pass: CachePass | None) -> None:
        """Raises RunError if a layer could not be read. The check comes after all layers, because the ranks of a model
        compute together.
        """
        layer_range, ranks = self.layer_range, self.layer_range.ranks
        streams: list[Checked] = [source.stream for source in (layer_range.streamed, kv_pass) if source is not None]
        if (store := layer_range.weights.expert_store) is not None:
            streams.append(store)
        if streams:
            failed = any(stream.pass_failed for stream in streams)
            require_whole(streams, failed if ranks is None else ranks.agree("the layers", flag=failed))

    def _result(self, step: StepInput, chunk: Chunk, hidden_NH: Tensor, seen: list[Tensor]) -> Tensor | None:
        layer_range, rows = self.layer_range, chunk.rows
        hidden_BTH = hidden_NH.view(rows.batch, rows.tokens, -1)
        if layer_range.weights.head is None:
            return normalise(layer_range.weights.final_norm, hidden_NH).view_as(hidden_BTH)
        if not chunk.keep:
            return None
        with stage(chunk.phase, Stage.LM_HEAD):
            return self._head(layer_range.weights.head, step, chunk.keep, hidden_BTH, seen)

    def _head(self, head: HeadWeights, step: StepInput, keep: int, hidden_BTH: Tensor, seen: list[Tensor]) -> Tensor:
        layer_range, threads = self.layer_range, team_size()
        kept = hidden_BTH if step.hidden_states else hidden_BTH[:, -keep:]
        normed = normalise(layer_range.weights.final_norm, kept.flatten(0, 1).contiguous())
        if head.project_out is not None:
            normed = gemm(normed, head.project_out, threads=threads, impl=layer_range.impl)
        if step.hidden_states:
            seen.append(normed.view(*hidden_BTH.shape[:2], -1))
            normed = seen[-1][:, -keep:].flatten(0, 1).contiguous()
        logits = gemm(normed, head.matrix, threads=threads, impl=layer_range.impl).view(len(hidden_BTH), keep, -1)
        if head.cap is not None:
            logits = soft_capped(logits, head.cap)
        if layer_range.ranks is not None:
            logits = (
                layer_range.ranks.side_by_side(logits)
                if step.top is None
                else layer_range.ranks.largest(logits, step.top)
            )
        return argmax_or_minus_one(logits) if step.greedy else logits

    def _first_rows(self, chunk: Chunk) -> Tensor:
        """Returns the input of the first layer."""
        embedding = self.layer_range.weights.embedding
        if embedding is None:
            assert chunk.inputs is not None
            return chunk.inputs
        assert chunk.tokens is not None
        with stage(chunk.phase, Stage.EMBED):
            return self._embed(embedding, chunk.tokens.to(self.layer_range.device), chunk.rows)

    def _embed(self, w: EmbeddingWeights, tokens_BT: Tensor, rows: Rows) -> Tensor:
        hidden = self._look_up(w, tokens_BT.flatten())
        hidden = hidden if w.scale == 1.0 else hidden * w.scale
        if w.project_in is not None:
            hidden = gemm(hidden, w.project_in, threads=team_size(), impl=self.layer_range.impl)
        if w.norm_first:
            hidden = normalise(w.norm, hidden)
        if w.positions is not None:
            hidden = hidden + w.positions[rows.positions.long() + w.position_offset]
        return (hidden if w.norm_first else normalise(w.norm, hidden)).contiguous()

    def _look_up(self, w: EmbeddingWeights, tokens: Tensor) -> Tensor:
        """Returns rows of the embedding table, float32 [tokens, E]. Each rank has a part of the table, so the ranks'
        rows are summed.
        """

        def table_rows(ids: Tensor) -> Tensor:
            if w.table is not None:
                return w.table[ids].float()
            assert w.packed is not None
            return unpack_rows(w.packed, ids)

        ranks = self.layer_range.ranks
        if ranks is None:
            return table_rows(tokens)
        own = (tokens >= w.vocab.start) & (tokens < w.vocab.stop)
        rows = table_rows(torch.where(own, tokens - w.vocab.start, 0))
        return ranks.sum(torch.where(own[:, None], rows, 0.0).contiguous())


def _counter(cache: KVCache, past: int, alone: bool) -> Tensor | None:
    """Returns `past` as a counter on a GPU, needed if later chunks have been placed. alone: the step has one chunk."""
    if alone or cache.pool is None:
        return None
    return torch.full((1,), past, dtype=torch.int32, device=cache.device)


def _keys_and_values(
    cache: KVCache, kv_pass: CachePass | None, layer: int, phase: Phase
) -> AbstractContextManager[LayerCache]:
    """Context with a layer's resident keys and values."""
    if kv_pass is None:
        return nullcontext(cache.layer(layer))
    return kv_pass.resident(layer, stage(phase, Stage.FETCH_KV, layer))
