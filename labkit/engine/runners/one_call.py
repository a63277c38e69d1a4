"""A step as one C++ call: all layers in one parallel region, the clock stamped behind every stage at no cost."""

from __future__ import annotations

from time import perf_counter_ns

import torch
from torch import Tensor

from labkit.engine.memory.kv_cache import KVCache
from labkit.engine.runners.layer_range import LayerRange
from labkit.engine.runners.reading_choice import ReadingChoices
from labkit.engine.runners.stage_clock import StageClock
from labkit.engine.runners.step import Chunk, Runner, StepInput, StepOutput, joined, placed_chunks
from labkit.kernels import DecodeStep
from labkit.kernels.gpu import CPU


class OneCallRunner(Runner):
    """Runs the steps of layers whose weights are in memory, packed for the C++ kernels."""

    def __init__(self, held: LayerRange) -> None:
        self.held = held
        self.step = DecodeStep(held.weights, held.ranks.exchange if held.ranks else None)
        self.clock = StageClock(held.config.num_layers, held.stages)
        self.readings = ReadingChoices()

    @property
    def reading(self) -> str:
        return str(self.readings)

    def new_cache(self, capacity: int = 0) -> KVCache:
        return self.held.new_cache(capacity)

    def begin(self, step: StepInput) -> StepOutput:
        results: list[Tensor] = []
        rows: list[Tensor] = []
        to = rows if self.held.weights.head is None else results
        for chunk in placed_chunks(step, CPU):
            with self.held.one_at_a_time:
                found = self._run(step, chunk)
            if found is not None:
                to.append(found)
        return StepOutput(joined(results), rows=joined(rows))

    def _run(self, step: StepInput, chunk: Chunk) -> Tensor | None:
        """Logits, argmax, or the rows behind the last layer of this range; None where the chunk keeps nothing."""
        held, batch, keep = self.held, chunk.rows.batch, chunk.keep
        head = held.weights.head
        logits = argmax = outputs = None
        if head is None:
            keep = 0
            outputs = torch.empty(batch * chunk.rows.tokens, held.weights.hidden)
        elif keep and step.greedy:
            argmax = torch.empty(batch, keep, dtype=torch.int64)
        elif keep:
            logits = torch.empty(batch, keep, head.vocab_size)
        choice = self.readings.of(batch, chunk.rows.tokens)
        begun = perf_counter_ns()
        self.step(
            chunk.tokens,
            chunk.rows,
            held.rotary.reaching(step.cache.reach),
            step.cache.c,
            step.cache.length,
            threads=torch.get_num_threads(),
            keep=keep,
            logits=logits,
            argmax=argmax,
            own_logits=step.top is not None,
            inputs=chunk.inputs,
            outputs=outputs,
            reading=choice.next,
        )
        choice.took(perf_counter_ns() - begun)
        self.clock.add(chunk.phase, self.step.stamps, head=keep > 0)
        if outputs is not None:
            return outputs.view(batch, chunk.rows.tokens, -1)
        if logits is not None and held.ranks is not None and step.top is not None:
            vocab = held.part.vocab
            return held.ranks.largest(logits[..., vocab.start : vocab.stop], step.top)
        return argmax if step.greedy else logits
