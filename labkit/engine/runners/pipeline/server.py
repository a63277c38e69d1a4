"""A stage that serves: it runs its layers on whatever arrives, until the last stage says how the texts went on."""

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
    """The work of a stage before the last, for one call.

    The pieces of a long prompt go on one by one, so that the next stage begins with the first. With the schedule
    "naive", of which one stage works at a time, they go on together.
    """

    def __init__(self, stage: PipelineStage, inner: Runner) -> None:
        self.stage, self.inner = stage, inner
        self._held: list[Tensor] = []

    def serve(self, batches: list[MicroBatch]) -> Tensor:
        """The tokens of all rows, prompt included, int64 [B, T]."""
        end = self._serve(batches)
        self._pass_on(end)
        return end.payload

    def _serve(self, batches: list[MicroBatch]) -> Message:
        """Returns the message with which it ends."""
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
                self._told(message, batches)
                continue
            batch = batches[message.micro_batch]
            self._run(batch, batch.next_step(message.payload), message.step, phase)

    def _run(self, batch: MicroBatch, step: StepInput, number: int, phase: Phase) -> None:
        with self.stage.computing(phase, batch.number, number):
            rows = self.inner.begin(step).collect().rows
        assert rows is not None
        self._held.append(rows.flatten(0, 1))
        if batch.has_prompt_left and self.stage.wanted.schedule == "naive":
            return
        for held in self._held:
            self.stage.send(MessageKind.ROWS, batch.number, number, held, phase)
        self._held.clear()

    def _told(self, message: Message, batches: list[MicroBatch]) -> None:
        """What the last stage says of the micro-batches goes on to all others."""
        if self.stage.number < self.stage.count - 2:  # behind which is the last
            self.stage.send(MessageKind(message.kind), message.micro_batch, message.step, message.payload, Phase.DECODE)
        if message.kind == MessageKind.COUNTS:
            found = Compared.said_in(message.payload)
            self.stage.counts.note(found)
            if self.stage.is_first:
                log.info("labkit: pipeline_parallel: %s", found)
        elif message.kind == MessageKind.REGROUP:
            members = [(batches[number].cache, goes_on, size) for number, goes_on, size in message.payload.tolist()]
            held = [cache for cache, goes_on, _ in members if goes_on]
            regroup_rows(held, [cache for cache, _, _ in members], [size for _, _, size in members])
        else:
            drop_rows(batches[message.micro_batch].cache, message.payload[0].tolist())

    def _pass_on(self, end: Message) -> None:
        """To the next stage; the last one, which said it, hears that it has been round."""
        payload = NOTHING if self.stage.number == self.stage.count - 2 else end.payload
        self.stage.send(MessageKind.END, 0, 1, payload, Phase.DECODE)
