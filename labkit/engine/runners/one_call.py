"""A step as one C++ call: all layers in one parallel region, with the time of every stage at no cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from time import perf_counter_ns

import torch
from torch import Tensor

from labkit.engine.runners.checks import most_positions
from labkit.engine.runners.groups import grouped_chunks, joined_groups, padded_groups
from labkit.engine.runners.kept_readings import KeptReadings, matrices_text
from labkit.engine.runners.layer_range import LayerRange
from labkit.engine.runners.reading_choice import ReadingChoice, ReadingChoices
from labkit.engine.runners.runner import Runner, RunnerInfo
from labkit.engine.runners.stage_clock import StageClock
from labkit.engine.runners.step import Ahead, Chunk, StepInput, StepOutput, joined, written
from labkit.engine.team_size import team_size
from labkit.kernels import DecodeStep
from labkit.kernels.decode_step import ChunkArgs
from labkit.stages import Phase

CALL_NS = 150_000_000  # of steps in one call: an interrupt (Ctrl-C) waits for its end
MOST_STEPS = 32


@dataclass
class _Put:
    """Gives a step's tokens to a listener. Meanwhile the runner may run steps of other texts.

    ns: time of the listener.
    """

    put: Callable[[Tensor], bool]
    one_at_a_time: Lock
    ns: int = 0

    def __call__(self, tokens: Tensor) -> bool:
        begun = perf_counter_ns()
        self.one_at_a_time.release()
        try:
            return self.put(tokens)
        finally:
            self.one_at_a_time.acquire()
            self.ns += perf_counter_ns() - begun


class OneCallRunner(Runner):
    """Runs the steps of layers packed for the C++ kernels. Layers are resident or streamed."""

    def __init__(self, layer_range: LayerRange) -> None:
        super().__init__(layer_range, StageClock(layer_range.config.num_layers, layer_range.stages))
        exchange = layer_range.ranks.exchange if layer_range.ranks else None
        self.step = DecodeStep(
            layer_range.weights, exchange, layer_range.streamed, kv_streamed=layer_range.backing_store is not None
        )
        streamed = layer_range.streamed is not None
        matrices = matrices_text(layer_range.weights, streamed=streamed)
        self.readings = ReadingChoices(KeptReadings(Path(self.step.library._name).stem, matrices))
        self._step_ns = 0  # of the latest step
        self.chosen_experts: list[torch.Tensor] | None = None  # a list: every pass appends its rows' experts

    @property
    def info(self) -> RunnerInfo:
        return replace(super().info, reading=str(self.readings))

    def _begin(self, step: StepInput) -> StepOutput:
        if step.ahead is not None and self.chosen_experts is None and (most := self._steps_ahead(step, step.ahead)) > 1:
            return self._run_ahead(step, step.ahead, most)
        if groups := self._groups(step):
            return StepOutput(self._by_groups(step, groups))
        parts = self.layer_range.results(step, lambda chunks: self._run(step, chunks))
        return StepOutput(rows=joined(parts)) if self.layer_range.weights.head is None else StepOutput(joined(parts))

    def _steps_ahead(self, step: StepInput, ahead: Ahead) -> int:
        """Steps that one call can run: some milliseconds of them, within the memory and the tables of the cache."""
        layer_range, cache = self.layer_range, step.cache
        chooses = step.follows and layer_range.chooses_tokens(step)
        if not chooses or step.greedy is not (ahead.choice is None) or layer_range.once_a_step:
            return 1
        choice = self.readings.of(step.shape[0], 1)
        if choice.compares or not self._step_ns:
            return 1
        room = min(cache.capacity - cache.length, most_positions(self.config, cache) - cache.reach)
        most = min(ahead.most, room, max(1, CALL_NS // self._step_ns), MOST_STEPS)
        return most if layer_range.rotary_of(cache).holds(cache.reach + most, cache) else 1

    def _run_ahead(self, step: StepInput, ahead: Ahead, most: int) -> StepOutput:
        """Runs several steps of one new token."""
        layer_range, cache, batch = self.layer_range, step.cache, step.shape[0]
        head, choice = layer_range.weights.head, self.readings.of(batch, 1)
        assert head is not None
        ended = torch.zeros(batch, dtype=torch.uint8)
        ended[list(ahead.ended)] = 1
        logits = None if ahead.choice is None else torch.empty(batch, 1, head.vocab_size)
        put = None if ahead.put is None else _Put(ahead.put, layer_range.one_at_a_time)
        with layer_range.one_at_a_time:
            chunk = ChunkArgs(cache.place_next(batch), cache.length, step.tokens, keep=1, logits=logits)
            begun = perf_counter_ns()
            tokens = self.step.run_ahead(
                chunk,
                layer_range.rotary_of(cache).reaching(cache.reach + most),
                cache.c,
                most=most,
                marks=ahead.marks(head.vocab_size),
                ended=ended,
                pad=ahead.pad,
                choice=ahead.choice,
                threads=team_size(),
                reading=choice.next,
                put=put,
            )
            steps = tokens.shape[1]
            self._note_time(choice, perf_counter_ns() - begun - (put.ns if put else 0), steps)
            self.clock.add(Phase.DECODE, self.step.times, self.step.experts_read, head=True, steps=steps)
        cache.length += steps
        cache.reach += steps - 1  # `place_next` counted the first
        if logits is None:
            return StepOutput(tokens)
        unsure = int(tokens[:, -1].min()) < 0  # torch's rounding decides the last step
        return StepOutput(logits, chosen=steps - 1) if unsure else StepOutput(chosen=steps)

    def _note_time(self, choice: ReadingChoice, ns: int, steps: int) -> None:
        choice.took(ns, steps)
        self._step_ns = ns // steps

    def _groups(self, step: StepInput) -> list[range]:
        """Groups of a padded prompt's sequences; empty: the batch stays whole."""
        layer_range = self.layer_range
        stays_whole = step.follows or layer_range.weights.head is None or layer_range.backing_store is not None
        return [] if stays_whole else padded_groups(step)

    def _by_groups(self, step: StepInput, groups: list[range]) -> Tensor | None:
        with self.layer_range.one_at_a_time:
            chunks = list(grouped_chunks(step, groups))
            passes = [chunks] if self.layer_range.once_a_step else [[chunk] for chunk in chunks]
            parts = [part for chunks_of_pass in passes for part in self._run(step, chunks_of_pass)]
        return joined_groups(step, chunks, parts)

    def _run(self, step: StepInput, chunks: list[Chunk]) -> list[Tensor | None]:
        """Returns logits, argmax, or the output rows of the last layer for each chunk; None for a chunk that keeps
        nothing.
        """
        layer_range, phase, shape = self.layer_range, chunks[0].phase, chunks[0].rows
        choice = self.readings.of(shape.batch, shape.tokens)
        chunks, rotary = layer_range.rotated(chunks, step.cache)
        arguments = [self._with_room_for_results(step, chunk) for chunk in chunks]
        chosen = None
        if self.chosen_experts is not None:
            rows, weights = sum(chunk.num_rows for chunk in arguments), layer_range.weights
            chosen = torch.empty(len(weights.mixtures), rows, weights.experts_of_a_row, dtype=torch.int64)
            self.chosen_experts.append(chosen)
        begun = perf_counter_ns()
        self.step.run(
            arguments,
            rotary,
            step.cache.c,
            threads=team_size(),
            own_logits=step.top is not None,
            reading=choice.next,
            kv_pass=step.cache.begin_pass(written(step.cache, chunks)),
            chosen=chosen,
        )
        self._note_time(choice, perf_counter_ns() - begun, 1)
        self.clock.add(phase, self.step.times, self.step.experts_read, head=any(chunk.keep for chunk in arguments))
        return [self._result(step, chunk) for chunk in arguments]

    def _with_room_for_results(self, step: StepInput, chunk: Chunk) -> ChunkArgs:
        batch, keep, head = chunk.rows.batch, chunk.keep, self.layer_range.weights.head
        logits = argmax = outputs = None
        if head is None:
            keep = 0
            outputs = torch.empty(batch * chunk.rows.tokens, self.layer_range.weights.hidden)
        elif keep and step.greedy:
            argmax = torch.empty(batch, keep, dtype=torch.int64)
        elif keep:
            logits = torch.empty(batch, keep, head.vocab_size)
        return ChunkArgs(
            rows=chunk.rows,
            past=chunk.past,
            tokens=chunk.tokens,
            keep=keep,
            logits=logits,
            argmax=argmax,
            inputs=chunk.inputs,
            outputs=outputs,
            first_sequence=chunk.first_sequence,
        )

    def _result(self, step: StepInput, chunk: ChunkArgs) -> Tensor | None:
        """Returns the result of a chunk; None if it keeps nothing."""
        layer_range, logits = self.layer_range, chunk.logits
        if chunk.outputs is not None:
            return chunk.outputs.view(chunk.rows.batch, chunk.rows.tokens, -1)
        if logits is not None and layer_range.ranks is not None and step.top is not None:
            vocab = layer_range.spec.part.vocab
            return layer_range.ranks.largest(logits[..., vocab.start : vocab.stop], step.top)
        return chunk.argmax if step.greedy else logits
