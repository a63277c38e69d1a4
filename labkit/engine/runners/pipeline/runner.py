"""Runs the steps of a model whose layers are on several ranks.

Texts are continued in micro-batches. The last stage leads: it has the logits, so it chooses the tokens. It sends them
to the first stage, which begins the next step with them. The other stages serve: they run their layers on incoming
rows, in the order of arrival, and send the rows on. Every rank makes the same call and knows the prompts, so the leader
does not have to send these.

Keys and values may be offloaded to disk. Each micro-batch then has a file on every stage, and slots for its own rows;
all micro-batches together need as many bytes as one batch. The stages read whenever they have a free slot. They could
take turns instead: one stage reads for its odd layers while the next reads for its even ones, as in DeepSpeed's article
on GPUs that share a link. Turns were measured once, on an AMD EPYC with a virtual disk, and not added: two readers at
once got 0.95 GB/s, in turns 0.91 to 0.92, and a token took 564 ms against 621. With GPUs, keys and values may be
offloaded to the host's memory in the same way.

All other calls of the model run one step at a time, and every rank makes the same calls: the rows go from the first
stage to the last, and the result goes to all ranks.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from labkit.engine.memory.keeping import KeptOnError
from labkit.engine.memory.kv_cache import KVCache
from labkit.engine.memory.regroup import share_memory
from labkit.engine.options import MicroBatches
from labkit.engine.parallel.micro_batch_counts import Compared
from labkit.engine.parallel.pipeline_stage import MessageKind, PipelineStage
from labkit.engine.parallel.ranks import RanksDifferError, check_alike, digest_of, draw_alike
from labkit.engine.parallel.shared_calls import SharedCalls
from labkit.engine.runners.checks import check_step
from labkit.engine.runners.driving import Generated, TextBatch
from labkit.engine.runners.long_texts import choose_rotation
from labkit.engine.runners.pipeline.chooser import Chooser, Division
from labkit.engine.runners.pipeline.leader import Leader
from labkit.engine.runners.pipeline.micro_batch import MicroBatch, chunks_of, piece_rows, with_rows
from labkit.engine.runners.pipeline.server import Server
from labkit.engine.runners.runner import Runner, RunnerInfo
from labkit.engine.runners.step import CHUNK_ROWS, Pending, StepInput, StepOutput, joined
from labkit.models.shards import evenly
from labkit.stages import Phase
from labkit.system.errors import UnsupportedError, UserError

log = logging.getLogger("labkit")


class PipelineRunner(Runner):
    """Runner of one stage.

    inner: runs the layers of this stage.
    ranks: rank group that shares these layers; None: one rank has them.
    calls: shared by all ranks.
    """

    def __init__(self, inner: Runner, stage: PipelineStage, calls: SharedCalls) -> None:
        super().__init__(inner.layer_range, inner.clock)
        self.inner, self.stage, self.ranks, self.calls = inner, stage, inner.layer_range.ranks, calls
        self._leader: Leader | None = None  # while texts are under way
        self._warned: set[str] = set()

    @property
    def info(self) -> RunnerInfo:
        return replace(self.inner.info, pipeline=self.stage)

    def shared_call(self, name: str) -> AbstractContextManager[None]:
        return self.calls.one(name)

    def before_generation(self) -> None:
        """Makes all ranks draw the random numbers of rank 0."""
        self.inner.before_generation()
        draw_alike(self.stage.device, lambda state: self.stage.ring.gather(state)[0])

    def after_generation(self, tokens: Tensor) -> None:
        """Copies the random state of the last stage, which alone has drawn numbers, to all ranks."""
        self.inner.after_generation(tokens)
        draw_alike(self.stage.device, lambda state: self.stage.ring.gather(state)[-1])

    def _begin(self, step: StepInput) -> Pending:
        if self._leader is not None and (batch := self._leader.batch_of(step)) is not None:
            return self._leader.order(step, batch)
        return self._one_at_a_time(step)

    def decode(self, texts: TextBatch) -> Generated:
        with KeptOnError(texts.cache):  # on every stage, however many steps each has made
            return self._decoded(texts)

    def _decoded(self, texts: TextBatch) -> Generated:
        self._agree("the arguments", [texts.asked])
        if not texts.wants_tokens_alone:
            return super().decode(texts)
        batches = self._micro_batches(texts)
        for batch in batches:
            check_step(batch.prompt, self.config)
            choose_rotation(batch.prompt)
        prompts = [batch.prompt for batch in batches]
        self._agree(
            "the tokens", [(step.tokens, step.cache.length, step.attention_mask, step.position_ids) for step in prompts]
        )
        if not self.stage.is_last:
            return Server(self.stage, self.inner).serve(batches).to(texts.tokens.device)
        self._leader = Leader(self.stage, self.inner, batches, self._chooser(texts, batches))
        try:
            return self._leader.lead(self.begin)
        finally:
            self._leader = None

    def _micro_batches(self, texts: TextBatch) -> list[MicroBatch]:
        count, piece = self._count(texts), self._piece(texts.tokens.numel(), texts.cache)
        if count == 1:
            return [MicroBatch.of(0, texts, range(texts.rows), piece)]
        parts = evenly(texts.rows, count)
        new_cache = self.layer_range.new_cache
        batches = [MicroBatch.of(at, texts.part(rows, new_cache()), rows, piece) for at, rows in enumerate(parts)]
        if _divisible(batches):
            share_memory([batch.cache for batch in batches], list(map(len, parts)), texts.tokens.shape[1])
        return batches

    def _piece(self, rows: int, cache: KVCache) -> int:
        """Returns the number of prompt rows that go through the stages at a time."""
        offloaded = cache.backing_store is not None  # each piece would read the earlier ones back
        if self.stage.options.schedule == "naive" or offloaded:  # with "naive" one stage works at a time
            return CHUNK_ROWS
        return piece_rows(rows, self.stage.count)

    def _chooser(self, texts: TextBatch, batches: list[MicroBatch]) -> Chooser:
        """Returns the chooser that divides the rows of a call, which begins with these micro-batches.

        A trial of one micro-batch needs the option "auto" and no random draws, since tokens would depend on times. On a
        GPU, rows that become fewer are not divided anew, since that would need new graphs.
        """
        option, rows = self.stage.options.micro_batches, texts.rows
        divisible = self.stage.options.schedule == "queue" and texts.ends is not None and _divisible(batches)
        count = option.decode if isinstance(option, MicroBatches) else len(batches)
        begun = Division(
            stages=self.stage.count,
            rows=rows,
            micro_batches=min(count, len(batches)),
            prompt=texts.tokens.shape[1],
            again=divisible and texts.cache.pool is None,
            tries=divisible and option == "auto" and not texts.draws,
            longest=texts.longest,
        )
        return Chooser(begun, self.stage.counts, self._of_rank_0, self._tell)

    def _of_rank_0(self, number: float) -> float:
        """Returns rank 0's `number` on all ranks of the rank group that shares these layers."""
        return number if self.ranks is None else float(self.ranks.gather(torch.tensor([number]))[0])

    def _tell(self, trial: Compared) -> None:
        """Tells the other stages how long tokens take."""
        self.stage.send(MessageKind.COUNTS, 0, 1, trial.payload, Phase.DECODE)

    def _count(self, texts: TextBatch) -> int:
        """Returns the number of micro-batches. Raises UserError if it is larger than the number of rows."""
        options, stages, rows = self.stage.options, self.stage.count, texts.rows
        option = options.micro_batches
        count = stages if option == "auto" else option if isinstance(option, int) else option.prompt
        if isinstance(option, MicroBatches) and (texts.ends is None or not _joinable(texts.cache)):
            count = option.decode  # without `ends` only a micro-batch's own loop knows whether a row has ended
        if option != "auto" and count > rows:
            raise UserError(
                f"got micro_batches={count} for a batch of {rows} row{'s' * (rows > 1)}; use at most {rows}, or 'auto'"
            )
        if options.schedule == "naive":
            return 1
        if rows == 1:
            self._warn_once("a batch of one has one stage at work at a time; more rows would keep all stages busy")
        elif (reason := texts.together) is not None:
            self._warn_once(f"the batch goes through the stages in one piece, because {reason}")
            return 1
        return min(count, rows)

    def _warn_once(self, text: str) -> None:
        if self.stage.is_first and text not in self._warned:
            log.warning("labkit: pipeline_parallel: %s", text)
        self._warned.add(text)

    def _agree(self, subject: str, parts: object) -> None:
        """Raises RanksDifferError on all ranks if their `parts` differ."""
        mine = digest_of(*_flat(parts))[None] if self.ranks is None else self.ranks.gather(digest_of(*_flat(parts)))
        check_alike(subject, self.stage.ring.gather(mine).flatten(0, 1))

    def _one_at_a_time(self, step: StepInput) -> StepOutput:
        """Runs a step that all ranks begin in the same way."""
        if step.hidden_states:
            raise UnsupportedError(
                "output_hidden_states: the layers are on several ranks, which keep what they compute; use one process"
            )
        if not step.follows:
            self._agree(
                "the tokens", [step.tokens, step.cache.length, step.attention_mask, step.position_ids, step.keep]
            )
        pieces = chunks_of(step, self._piece(prod(step.shape), step.cache))
        parts = [self._passed_through(part) for part in pieces]
        return StepOutput(self._shared(joined([part for part in parts if part is not None]), step))

    def _passed_through(self, step: StepInput) -> Tensor | None:
        """Runs a piece of a step. Returns its result on the last stage, None on the others."""
        stage, phase, number = self.stage, step.phase, int(step.phase == Phase.DECODE)
        own_step = step if stage.is_first else with_rows(step, self._received(MessageKind.ROWS, phase))
        with stage.computing(phase, 0, number):
            output = self.inner._begin(own_step).collect()
        if stage.is_last:
            return output.result
        assert output.rows is not None
        stage.send(MessageKind.ROWS, 0, number, output.rows.flatten(0, 1), phase)
        return None

    def _received(self, kind: MessageKind, phase: Phase) -> Tensor:
        message, _ = self.stage.receive(phase)
        if message.kind != kind:
            raise RanksDifferError("another stage has made a different call; call all ranks with the same arguments")
        return message.payload

    def _shared(self, result: Tensor | None, step: StepInput) -> Tensor:
        """Returns the last stage's result on all stages."""
        stage, batch = self.stage, step.shape[0]
        if not stage.is_last:
            result = self._received(MessageKind.RESULT, step.phase).to(stage.device)
        assert result is not None
        if stage.number != stage.count - 2:  # the next stage is not the last
            stage.send(MessageKind.RESULT, 0, 0, result.view(result.shape[0], -1), step.phase)
        return result.view(batch, -1) if step.greedy else result.view(batch, -1, self.config.vocab_size)


def _divisible(batches: list[MicroBatch]) -> bool:
    """Tells whether rows can move between micro-batches at little cost, because their keys and values are resident. In
    a file, all of them would be written anew.
    """
    return len(batches) > 1 and all(batch.cache.backing_store is None for batch in batches)


def _joinable(cache: KVCache) -> bool:
    """Tells whether several such caches can become one. Offloaded keys and values of a GPU can't: they would be in the
    host's memory twice.
    """
    return cache.pool is None or cache.backing_store is None


def _flat(parts: object) -> list[object]:
    return [leaf for part in parts for leaf in _flat(part)] if isinstance(parts, list | tuple) else [parts]
