"""The last stage's part: it chooses the tokens, and says what the other stages do next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter_ns

import torch
from torch import Tensor
from torch.nn import functional as F

from labkit.engine.memory.regroup import EndedRows, drop_rows, join_rows, rows_left
from labkit.engine.options import MicroBatches
from labkit.engine.parallel.pipeline_stage import MessageKind, PipelineStage
from labkit.engine.runners.driving import Loop, drive
from labkit.engine.runners.pipeline.micro_batch import MicroBatch, chunks_of, with_rows
from labkit.engine.runners.pipeline.schedules import SCHEDULES
from labkit.engine.runners.runner import Runner
from labkit.engine.runners.step import Pending, StepInput, StepOutput, joined
from labkit.models.shards import evenly
from labkit.stages import Phase


class Leader:
    """Continues the micro-batches of one call.

    With the schedule "queue", rows that have ended leave their micro-batch, whose steps get shorter. Where there are
    more micro-batches in the prompt than to decode, those that follow each other become one when all of them have their
    first tokens.
    """

    def __init__(self, stage: PipelineStage, inner: Runner, batches: list[MicroBatch]) -> None:
        self.stage, self.inner, self.batches = stage, inner, batches
        self._by_cache = {id(batch.cache): batch for batch in batches}
        self._texts: dict[int, Tensor] = {}  # that are whole, by row
        ends = batches[0].texts.ends if stage.wanted.schedule == "queue" and len(batches) > 1 else None
        self._ends = ends or frozenset()
        self._through_prompt: set[int] = set()

    def batch_of(self, step: StepInput) -> MicroBatch | None:
        """The micro-batch that a step belongs to; None: to none of these."""
        return self._by_cache.get(id(step.cache))

    def lead(self, begin: Callable[[StepInput], Pending]) -> Tensor:
        """The tokens of all rows, prompt included, int64 [B, T]."""
        self._run(begin)
        texts, pad = [self._texts[row] for row in range(len(self._texts))], self.batches[0].texts.pad
        longest = max(map(len, texts))
        tokens = torch.stack([F.pad(text, (0, longest - len(text)), value=pad) for text in texts]).long()
        self._end(tokens)
        return tokens

    def _run(self, begin: Callable[[StepInput], Pending]) -> None:
        wanted, count = self.stage.wanted.micro_batches, len(self.batches)
        if isinstance(wanted, MicroBatches) and wanted.decode < count:
            groups = [self.batches[part.start : part.stop] for part in evenly(count, wanted.decode)]
            drive(begin, [self._first_tokens(batch) for batch in self.batches], partial(self._joined, groups))
        else:
            SCHEDULES[self.stage.wanted.schedule](begin, [self._to_the_end(batch) for batch in self.batches])

    def _end(self, tokens: Tensor) -> None:
        """The others get the tokens; what is still under way nobody wants."""
        self.stage.send(MessageKind.END, 0, 1, tokens, Phase.DECODE)
        while self.stage.receive(Phase.DECODE)[0].kind != MessageKind.END:
            pass

    def order(self, step: StepInput, batch: MicroBatch) -> Pending:
        """A step that the other stages begin with; its rows are waited for when it is collected."""
        number = batch.done
        batch.done += 1
        if number:
            assert step.tokens is not None
            self.stage.send(MessageKind.TOKENS, batch.number, number, step.tokens, Phase.DECODE)
        return Ordered(self, step, batch)

    def collect(self, step: StepInput, batch: MicroBatch) -> StepOutput:
        """What came of a step that was ordered."""
        parts = []
        for part in chunks_of(step):
            message, phase = self.stage.receive(step.phase)
            assert (message.kind, message.micro_batch) == (MessageKind.ROWS, batch.number)
            with self.stage.computing(phase, batch.number, message.step):
                parts.append(self.inner.begin(with_rows(part, message.payload)).collect().result)
        return StepOutput(joined([part for part in parts if part is not None]))

    def _to_the_end(self, batch: MicroBatch) -> Loop:
        """Continues a micro-batch; its rows leave it as they end."""
        while batch.rows:
            loop = batch.texts.loop()
            request = next(loop)
            if batch.done:  # these texts go on from tokens that the stages have not seen
                assert request.tokens is not None
                tokens = request.tokens.contiguous()
                request = request._replace(tokens=tokens, attention_mask=None, position_ids=None, follows=True)
            yield from self._until_rows_end(batch, loop, request)
        return batch.texts.tokens

    def _until_rows_end(self, batch: MicroBatch, loop: Loop, request: StepInput) -> Loop:
        so_far, ended = [batch.texts.tokens], EndedRows(batch.cache)
        while True:
            output = yield request
            begin = perf_counter_ns()
            try:
                request = loop.send(output)
            except StopIteration as end:
                self._note(batch.rows, end.value)
                batch.rows = []
                return end.value
            finally:
                phase = Phase.DECODE if batch.done > 1 else Phase.PREFILL
                self.stage.note("sample", phase, batch.number, batch.done - 1, begin)
            assert request.tokens is not None
            so_far.append(request.tokens.to(so_far[0].device))
            if leaving := ended.leaving(self._ended(request.tokens)):
                loop.close()
                self._leave(batch, torch.cat(so_far, dim=1), leaving)
                return batch.texts.tokens

    def _first_tokens(self, batch: MicroBatch) -> Loop:
        """Takes a micro-batch through its prompt, and to the end where that is all."""
        loop = batch.texts.loop()
        output = yield next(loop)
        begin = perf_counter_ns()
        try:
            request = loop.send(output)
        except StopIteration as end:
            self._note(batch.rows, end.value)
            batch.rows = []
            return batch.texts.tokens
        finally:
            self.stage.note("sample", Phase.PREFILL, batch.number, 0, begin)
        loop.close()
        assert request.tokens is not None
        tokens = torch.cat((batch.texts.tokens, request.tokens.to(batch.texts.tokens.device)), dim=1)
        self._leave(batch, tokens, self._ended(request.tokens))
        return tokens

    def _joined(self, groups: Sequence[list[MicroBatch]], place: int) -> Loop | None:
        """The loop of the micro-batches that become one with number `place`, once all of them are ready."""
        batch = self.batches[place]
        group = next(each for each in groups if batch in each)
        waiting = self._through_prompt
        waiting.add(place)
        members = [each for each in group if each.rows]
        if not members or not all(each.number in waiting for each in group):
            return None
        first, *others = members
        if others:
            numbers = torch.tensor([[each.number for each in members]])
            self.stage.send(MessageKind.JOIN, first.number, first.done, numbers, Phase.DECODE)
            join_rows([each.cache for each in members])
            first.texts = first.texts.continued(torch.cat([each.texts.tokens for each in members]))
            first.rows = [row for each in members for row in each.rows]
            for each in others:
                each.rows = []
        return self._to_the_end(first)

    def _ended(self, tokens_B1: Tensor) -> list[int]:
        """The rows that have just ended."""
        return [row for row, token in enumerate(tokens_B1.flatten().tolist()) if token in self._ends]

    def _leave(self, batch: MicroBatch, tokens: Tensor, ended: list[int]) -> None:
        """The micro-batch goes on from these tokens without the rows that have ended, on all stages."""
        self._note([batch.rows[row] for row in ended], tokens[ended])
        left = rows_left(len(batch.rows), ended)
        if ended:
            self.stage.send(MessageKind.DROP, batch.number, batch.done, torch.tensor([ended]), Phase.DECODE)
            drop_rows(batch.cache, ended)
        batch.rows = [batch.rows[row] for row in left]
        batch.texts = batch.texts.continued(tokens[left])

    def _note(self, rows: Sequence[int], tokens: object) -> None:
        """The texts of these rows are whole."""
        assert isinstance(tokens, Tensor)
        for row, text in zip(rows, tokens, strict=True):
            self._texts[row] = text


class Ordered:
    """A step under way through the stages."""

    def __init__(self, leader: Leader, step: StepInput, batch: MicroBatch) -> None:
        self._leader, self._step, self._batch = leader, step, batch

    def collect(self) -> StepOutput:
        return self._leader.collect(self._step, self._batch)
