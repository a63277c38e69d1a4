"""A stage that serves: it runs its layers on incoming rows, until the last stage sends the complete texts."""

from __future__ import annotations

import logging

from torch import Tensor

from labkit.engine.memory.regroup import drop_rows, regroup_rows
from labkit.engine.parallel.micro_batch_counts import Compared
from labkit.engine.parallel.pipeline_stage import NOTHING, MessageKind, PipelineStage
from labkit.engine.runners.pipeline.micro_batch import MicroBatch
from labkit.engine.runners.runner import Runner
from labkit.engine.runners.step import StepInput
from labkit.kernels.mailbox import Message
from labkit.stages import Phase

log = logging.getLogger("labkit")


class Server:
    """Work of a stage before the last, for one call.

    The pieces of a long prompt are sent one by one, so that the next stage can begin with the first. With the schedule
    "naive" one stage works at a time, and the pieces are sent together.
    """

    def __init__(self, stage: PipelineStage, inner: Runner) -> None:
        self.stage, self.inner = stage, inner
        self._unsent: list[Tensor] = []

    def serve(self, batches: list[MicroBatch]) -> Tensor:
        """Returns the tokens of all rows, prompt included, int64 [B, T]."""
        end = self._serve(batches)
        # The last stage, which sent the END message, gets it back without payload.
        payload = NOTHING if self.stage.number == self.stage.count - 2 else end.payload
        self.stage.send(MessageKind.END, 0, 1, payload, Phase.DECODE)
        return end.payload

    def _serve(self, batches: list[MicroBatch]) -> Message:
        """Serves until the END message, and returns it."""
        if self.stage.is_first:
            for batch in batches:
                for step in batch.prompt_steps():
                    self._run(batch, step, 0, Phase.PREFILL)
        while True:
            prompts = any(batch.has_prompt_left for batch in batches)
            message, phase = self.stage.receive(Phase.PREFILL if prompts else Phase.DECODE)
            if message.kind == MessageKind.END:
                return message
            if message.kind in (MessageKind.DROP, MessageKind.REGROUP, MessageKind.COUNTS):
                self._obey(message, batches)
                continue
            batch = batches[message.micro_batch]
            self._run(batch, batch.next_step(message.payload), message.step, phase)

    def _run(self, batch: MicroBatch, step: StepInput, number: int, phase: Phase) -> None:
        with self.stage.computing(phase, batch.number, number):
            rows = self.inner._begin(step).collect().rows
        assert rows is not None
        self._unsent.append(rows.flatten(0, 1))
        if batch.has_prompt_left and self.stage.options.schedule == "naive":
            return
        for piece in self._unsent:
            self.stage.send(MessageKind.ROWS, batch.number, number, piece, phase)
        self._unsent.clear()

    def _obey(self, message: Message, batches: list[MicroBatch]) -> None:
        """Applies the last stage's message about the micro-batches, and passes it on."""
        if self.stage.number < self.stage.count - 2:  # the next stage is not the last
            self.stage.send(MessageKind(message.kind), message.micro_batch, message.step, message.payload, Phase.DECODE)
        if message.kind == MessageKind.COUNTS:
            trial = Compared.from_payload(message.payload)
            self.stage.counts.note(trial)
            if self.stage.is_first:
                log.info("labkit: pipeline_parallel: %s", trial)
        elif message.kind == MessageKind.REGROUP:
            changes = message.payload.tolist()
            sources = [batches[number].cache for number, is_source, _ in changes if is_source]
            regroup_rows(sources, [batches[number].cache for number, _, _ in changes], [size for _, _, size in changes])
        else:
            drop_rows(batches[message.micro_batch].cache, message.payload[0].tolist())
