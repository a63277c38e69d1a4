"""The last stage's work: it chooses the tokens, and tells the other stages what to do next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter_ns

import torch
from torch import Tensor
from torch.nn import functional as F

from labkit.engine.memory.regroup import EndedRows, drop_rows, regroup_rows, rows_left
from labkit.engine.options import MicroBatches
from labkit.engine.parallel.pipeline_stage import MessageKind, PipelineStage
from labkit.engine.runners.driving import Loop, drive
from labkit.engine.runners.pipeline.chooser import Chooser
from labkit.engine.runners.pipeline.micro_batch import MicroBatch, chunks_of, with_rows
from labkit.engine.runners.pipeline.schedules import SCHEDULES
from labkit.engine.runners.runner import Runner
from labkit.engine.runners.step import CollectedLater, Pending, StepInput, StepOutput, joined
from labkit.models.shards import evenly
from labkit.stages import Phase


class Leader:
    """Continues the micro-batches of one call.

    With the schedule "queue", rows that have ended leave their micro-batch, whose steps get shorter. If the prompt has
    more micro-batches than decoding, neighbouring micro-batches are joined once all of them have their first tokens.
    After that the rows are divided anew when `chooser` says so: then all micro-batches pause after the same token.
    """

    def __init__(self, stage: PipelineStage, inner: Runner, batches: list[MicroBatch], chooser: Chooser) -> None:
        self.stage, self.inner, self.batches, self.chooser = stage, inner, batches, chooser
        self._until: int | None = None  # length of the texts at which all micro-batches pause
        self._by_cache = {id(batch.cache): batch for batch in batches}
        self._texts: dict[int, Tensor] = {}  # complete texts by row
        ends = batches[0].texts.ends if stage.options.schedule == "queue" and len(batches) > 1 else None
        self._ends = ends or frozenset()
        self._through_prompt: set[int] = set()

    def batch_of(self, step: StepInput) -> MicroBatch | None:
        """Returns the micro-batch of a step; None: the step belongs to another call."""
        return self._by_cache.get(id(step.cache))

    def lead(self, begin: Callable[[StepInput], Pending]) -> Tensor:
        """Returns the tokens of all rows, prompt included, int64 [B, T]."""
        self._run(begin)
        texts, pad = [self._texts[row] for row in range(len(self._texts))], self.batches[0].texts.pad
        longest = max(map(len, texts))
        tokens = torch.stack([F.pad(text, (0, longest - len(text)), value=pad) for text in texts]).long()
        self._end(tokens)
        return tokens

    def _run(self, begin: Callable[[StepInput], Pending]) -> None:
        option, count = self.stage.options.micro_batches, len(self.batches)
        schedule = SCHEDULES[self.stage.options.schedule]
        if isinstance(option, MicroBatches) and option.decode < count:
            groups = [self.batches[part.start : part.stop] for part in evenly(count, option.decode)]
            first = [self._continued(batch, batch.length + 1) for batch in self.batches]
            drive(begin, first, partial(self._joined, groups))
        else:
            self._until = self.chooser.first().until
            schedule(begin, [self._continued(batch) for batch in self.batches])
        while live := [batch for batch in self.batches if batch.rows]:
            lap = self.chooser.next(sum(len(batch.rows) for batch in live), live[0].length)
            self._until = lap.until
            schedule(begin, [self._continued(batch) for batch in self.regroup(live, lap.micro_batches)])

    def _end(self, tokens: Tensor) -> None:
        """Sends the tokens to the other stages, and drains the messages that are still under way."""
        self.stage.send(MessageKind.END, 0, 1, tokens, Phase.DECODE)
        while self.stage.receive(Phase.DECODE)[0].kind != MessageKind.END:
            pass

    def order(self, step: StepInput, batch: MicroBatch) -> Pending:
        """Orders a step from the other stages. `collect` of the result waits for its rows."""
        number = batch.done
        batch.done += 1
        if number:
            assert step.tokens is not None
            self.stage.send(MessageKind.TOKENS, batch.number, number, step.tokens, Phase.DECODE)
        return CollectedLater(partial(self._collect, step, batch))

    def _collect(self, step: StepInput, batch: MicroBatch) -> StepOutput:
        """Runs this stage's layers on the rows of an ordered step, as they arrive."""
        parts = []
        for part in chunks_of(step, batch.piece):
            message, phase = self.stage.receive(step.phase)
            assert (message.kind, message.micro_batch) == (MessageKind.ROWS, batch.number)
            with self.stage.computing(phase, batch.number, message.step):
                parts.append(self.inner._begin(with_rows(part, message.payload)).collect().result)
        return StepOutput(joined([part for part in parts if part is not None]))

    def _continued(self, batch: MicroBatch, until: int | None = None) -> Loop:
        """Continues a micro-batch until its texts have `until` tokens, all micro-batches pause, or the texts end. Rows
        leave it when they end.
        """
        while batch.rows and not self._pauses(batch.length, until):
            loop = batch.texts.loop()
            request = next(loop)
            if batch.done:  # the stages have not seen the last tokens of these texts
                assert request.tokens is not None
                tokens = request.tokens.contiguous()
                request = request._replace(tokens=tokens, attention_mask=None, position_ids=None, follows=True)
            yield from self._until_rows_end(batch, loop, request, until)
        return batch.texts.tokens

    def _pauses(self, length: int, until: int | None) -> bool:
        return any(end is not None and length >= end for end in (until, self._until))

    def _until_rows_end(self, batch: MicroBatch, loop: Loop, request: StepInput, until: int | None) -> Loop:
        so_far, ended = [batch.texts.tokens], EndedRows(batch.cache)
        length = batch.length
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
            length += 1
            self.chooser.chose(length)
            pauses = self._pauses(length, until)
            if (leaving := ended.leaving(self._ended(request.tokens), at_once=pauses)) or pauses:
                loop.close()
                self._leave(batch, torch.cat(so_far, dim=1), leaving)
                return batch.texts.tokens

    def _joined(self, groups: Sequence[list[MicroBatch]], place: int) -> Loop | None:
        """Returns the loop of the group that micro-batch number `place` joins, once the whole group has run its prompt.
        Returns None before, and after the joined loop itself, which has the same place.
        """
        waiting = self._through_prompt
        if place in waiting:
            return None
        waiting.add(place)
        group = next(batches for batches in groups if self.batches[place] in batches)
        members = [batch for batch in group if batch.rows]
        if not members or not all(batch.number in waiting for batch in group):
            return None
        (joined,) = self.regroup(members, 1)
        return self._continued(joined)

    def regroup(self, live: list[MicroBatch], count: int) -> list[MicroBatch]:
        """Divides the rows of micro-batches of equal length anew among `count`, on all stages, and returns these. No
        step of theirs may be under way.
        """
        rows = [row for batch in live for row in batch.rows]
        parts = evenly(len(rows), count)
        if [len(batch.rows) for batch in live] == [len(part) for part in parts]:
            return live
        spare = [batch for batch in self.batches if not batch.rows]
        taken = sorted([*live, *spare][:count], key=lambda batch: batch.number)
        members = sorted({*live, *taken}, key=lambda batch: batch.number)
        tokens, done = torch.cat([batch.texts.tokens for batch in live]), live[0].done
        for batch in members:
            batch.rows, batch.done = [], done
        for batch, part in zip(taken, parts, strict=True):
            batch.rows = rows[part.start : part.stop]
            batch.texts = batch.texts.continued(tokens[part.start : part.stop])
        changes = [(batch.number, batch in live, len(batch.rows)) for batch in members]
        self.stage.send(MessageKind.REGROUP, 0, done, torch.tensor(changes), Phase.DECODE)
        caches = [batch.cache for batch in members]
        regroup_rows([batch.cache for batch in live], caches, [len(batch.rows) for batch in members])
        return taken

    def _ended(self, tokens_B1: Tensor) -> list[int]:
        """Returns the rows that have just ended."""
        if not self._ends:
            return []
        return [row for row, token in enumerate(tokens_B1.flatten().tolist()) if token in self._ends]

    def _leave(self, batch: MicroBatch, tokens: Tensor, ended: list[int]) -> None:
        """Removes the ended rows from a micro-batch on all stages. Its other rows continue from `tokens`."""
        self._note([batch.rows[row] for row in ended], tokens[ended])
        left = rows_left(len(batch.rows), ended)
        if ended:
            self.stage.send(MessageKind.DROP, batch.number, batch.done, torch.tensor([ended]), Phase.DECODE)
            drop_rows(batch.cache, ended)
        batch.rows = [batch.rows[row] for row in left]
        batch.texts = batch.texts.continued(tokens[left])
        if ended and self._until is None:
            sizes = [len(live.rows) for live in self.batches if live.rows]
            if self.chooser.pauses(sizes, batch.length):
                self._until = batch.length + 1  # micro-batches take turns, so none is longer yet

    def _note(self, rows: Sequence[int], tokens: object) -> None:
        """Keeps the complete texts of these rows."""
        assert isinstance(tokens, Tensor)
        for row, text in zip(rows, tokens, strict=True):
            self._texts[row] = text
