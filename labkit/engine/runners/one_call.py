"""A step as one C++ call: all layers in one parallel region, the time of every stage taken at no cost."""

from __future__ import annotations

from time import perf_counter_ns

import torch
from torch import Tensor

from labkit.engine.memory.kv_cache import KVCache
from labkit.engine.runners.layer_range import LayerRange
from labkit.engine.runners.reading_choice import ReadingChoices
from labkit.engine.runners.runner import Runner
from labkit.engine.runners.stage_clock import StageClock
from labkit.engine.runners.step import Chunk, StepInput, StepOutput, joined, written
from labkit.engine.team_size import team_size
from labkit.kernels import DecodeStep
from labkit.kernels.decode_step import ChunkArgs


class OneCallRunner(Runner):
    """Runs the steps of layers that are packed for the C++ kernels: in memory, or some of them in a stream."""

    def __init__(self, held: LayerRange) -> None:
        self.held = held
        exchange = held.ranks.exchange if held.ranks else None
        self.step = DecodeStep(held.weights, exchange, held.streamed, kv_streamed=held.elsewhere is not None)
        self.clock = StageClock(held.config.num_layers, held.stages)
        self.readings = ReadingChoices()

    @property
    def reading(self) -> str:
        return str(self.readings)

    def new_cache(self, capacity: int = 0) -> KVCache:
        return self.held.new_cache(capacity)

    def begin(self, step: StepInput) -> StepOutput:
        parts = self.held.results(step, lambda chunks: self._run(step, chunks))
        return StepOutput(rows=joined(parts)) if self.held.weights.head is None else StepOutput(joined(parts))

    def _run(self, step: StepInput, chunks: list[Chunk]) -> list[Tensor | None]:
        """Of each chunk logits, argmax, or the rows behind the last layer here; None where it keeps nothing."""
        held, phase, shape = self.held, chunks[0].phase, chunks[0].rows
        choice = self.readings.of(shape.batch, shape.tokens)
        chunks, rotary = held.rotated(chunks, step.cache)
        given = [self._with_room_for_results(step, chunk) for chunk in chunks]
        begun = perf_counter_ns()
        self.step(
            given,
            rotary,
            step.cache.c,
            threads=team_size(),
            own_logits=step.top is not None,
            reading=choice.next,
            kv_pass=step.cache.begin_pass(written(step.cache, chunks)),
        )
        choice.took(perf_counter_ns() - begun)
        self.clock.add(phase, self.step.times, head=any(chunk.keep for chunk in given))
        return [self._found(step, chunk) for chunk in given]

    def _with_room_for_results(self, step: StepInput, chunk: Chunk) -> ChunkArgs:
        batch, keep, head = chunk.rows.batch, chunk.keep, self.held.weights.head
        logits = argmax = outputs = None
        if head is None:
            keep = 0
            outputs = torch.empty(batch * chunk.rows.tokens, self.held.weights.hidden)
        elif keep and step.greedy:
            argmax = torch.empty(batch, keep, dtype=torch.int64)
        elif keep:
            logits = torch.empty(batch, keep, head.vocab_size)
        return ChunkArgs(chunk.rows, chunk.past, chunk.tokens, keep, logits, argmax, None, chunk.inputs, outputs)

    def _found(self, step: StepInput, chunk: ChunkArgs) -> Tensor | None:
        """What a chunk gave."""
        held, logits = self.held, chunk.logits
        if chunk.outputs is not None:
            return chunk.outputs.view(chunk.rows.batch, chunk.rows.tokens, -1)
        if logits is not None and held.ranks is not None and step.top is not None:
            vocab = held.part.vocab
            return held.ranks.largest(logits[..., vocab.start : vocab.stop], step.top)
        return chunk.argmax if step.greedy else logits
