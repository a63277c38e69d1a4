"""Runs the steps of a model whose layers are on several ranks.

Texts are continued in micro-batches. The last stage leads: it has the logits, so it chooses the tokens, and sends them
to the first stage, with which their next step begins. The other stages serve: they run their layers on whatever
arrives, in the order in which it arrives, and send the rows on. All of them know the prompts, since every rank makes
the same call, so that these need no order.

Keys and values may lie on the disk: each micro-batch has a file on every stage, and slots for its own rows, which are
as many bytes together as those of one batch. The stages read whenever they have a free slot. They could take turns, one
at its odd layers and the next at its even ones, as DeepSpeed's article has GPUs do that share a link. That was measured
once, on an AMD EPYC with a virtual disk, and not added: two readers at once got 0.95 GB/s, in turns 0.91 to 0.92, and a
token took 564 ms against 621. Beside a GPU they may lie in the host's memory, in the same way.

Everything else that a model is asked for, one step at a time, every rank asks for alike: the rows go from the first
stage to the last, and what comes of them goes on to all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from math import prod

import torch
from torch import Tensor

from labkit.engine.memory.keeping import KeptOnError
from labkit.engine.memory.kv_cache import KVCache
from labkit.engine.memory.regroup import share_memory
from labkit.engine.options import MicroBatches
from labkit.engine.parallel.micro_batch_counts import Compared
from labkit.engine.parallel.pipeline_stage import MessageKind, PipelineStage
from labkit.engine.parallel.ranks import Ranks, RanksDifferError, check_alike, digest_of, draw_alike
from labkit.engine.parallel.shared_calls import SharedCalls
from labkit.engine.runners.checks import check_step
from labkit.engine.runners.driving import Found, TextBatch
from labkit.engine.runners.pipeline.chooser import Chooser, Division
from labkit.engine.runners.pipeline.leader import Leader
from labkit.engine.runners.pipeline.micro_batch import MicroBatch, chunks_of, piece_rows, with_rows
from labkit.engine.runners.pipeline.server import Server
from labkit.engine.runners.runner import Runner
from labkit.engine.runners.stage_clock import StageClock
from labkit.engine.runners.step import CHUNK_ROWS, Node, Pending, StepInput, StepOutput, joined
from labkit.models.config import ModelConfig
from labkit.models.shards import evenly
from labkit.stages import Phase
from labkit.system.errors import UnsupportedError, UserError

log = logging.getLogger("labkit")


class PipelineRunner(Runner):
    """The runner of one stage. inner: runs the layers that are here. ranks: that share these layers; None: no others.

    config: of the whole model. calls: of all ranks.
    """

    def __init__(
        self, inner: Runner, stage: PipelineStage, config: ModelConfig, ranks: Ranks | None, calls: SharedCalls
    ) -> None:
        self.inner, self.stage, self.config, self.ranks, self.calls = inner, stage, config, ranks, calls
        self._leader: Leader | None = None  # while texts are under way
        self._said: set[str] = set()

    @property
    def clock(self) -> StageClock:  # type: ignore[override]
        return self.inner.clock

    @property
    def reading(self) -> str:
        return self.inner.reading

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.inner.nodes

    @property
    def pipeline(self) -> PipelineStage:
        return self.stage

    def new_cache(self, capacity: int = 0) -> KVCache:
        return self.inner.new_cache(capacity)

    def shared_call(self, name: str) -> AbstractContextManager[None]:
        return self.calls.one(name)

    def before_generation(self) -> None:
        """All ranks draw the random numbers of rank 0."""
        self.inner.before_generation()
        draw_alike(self.stage.device, lambda state: self.stage.ring.gather(state)[0])

    def after_generation(self, tokens: Tensor) -> None:
        """Only the last stage has drawn numbers; the others go on from there."""
        self.inner.after_generation(tokens)
        draw_alike(self.stage.device, lambda state: self.stage.ring.gather(state)[-1])

    def begin(self, step: StepInput) -> Pending:
        if self._leader is not None and (batch := self._leader.batch_of(step)) is not None:
            return self._leader.order(step, batch)
        return self._one_at_a_time(step)

    def decode(self, begin: Callable[[StepInput], Pending], texts: TextBatch) -> Found:
        with KeptOnError(texts.cache):  # on every stage, however many steps each has made
            return self._decoded(begin, texts)

    def _decoded(self, begin: Callable[[StepInput], Pending], texts: TextBatch) -> Found:
        self._agree("the arguments", [texts.asked])
        if not texts.wants_tokens_alone:
            return super().decode(begin, texts)
        batches = self._micro_batches(texts)
        for batch in batches:
            check_step(batch.prompt, self.config)
        prompts = [batch.prompt for batch in batches]
        self._agree(
            "the tokens", [(each.tokens, each.cache.length, each.attention_mask, each.position_ids) for each in prompts]
        )
        if not self.stage.is_last:
            return Server(self.stage, self.inner).serve(batches).to(texts.tokens.device)
        self._leader = Leader(self.stage, self.inner, batches, self._chooser(texts, batches))
        try:
            return self._leader.lead(begin)
        finally:
            self._leader = None

    def _micro_batches(self, texts: TextBatch) -> list[MicroBatch]:
        count, piece = self._count(texts), self._piece(texts.tokens.numel(), texts.cache)
        if count == 1:
            return [MicroBatch.of(0, texts, range(texts.rows), piece)]
        parts = evenly(texts.rows, count)
        batches = [MicroBatch.of(at, texts.part(rows, self.new_cache()), rows, piece) for at, rows in enumerate(parts)]
        if _divisible(batches):
            share_memory([batch.cache for batch in batches], list(map(len, parts)), texts.tokens.shape[1])
        return batches

    def _piece(self, rows: int, cache: KVCache) -> int:
        """How many of the rows of prompts go through the stages at a time."""
        elsewhere = cache.elsewhere is not None  # from where each piece would read those before it
        if self.stage.wanted.schedule == "naive" or elsewhere:  # with "naive" one stage works at a time
            return CHUNK_ROWS
        return piece_rows(rows, self.stage.count)

    def _chooser(self, texts: TextBatch, batches: list[MicroBatch]) -> Chooser:
        """What divides the rows of a call, once they are in these micro-batches. One micro-batch is tried where it was
        not asked for a number of them, and where times may decide: with random draws, tokens would depend on them.
        Where rows become fewer on a GPU they are not divided anew, for which graphs would have to be recorded.
        """
        asked, rows = self.stage.wanted.micro_batches, texts.rows
        can = self.stage.wanted.schedule == "queue" and texts.ends is not None and _divisible(batches)
        count = asked.decode if isinstance(asked, MicroBatches) else len(batches)
        begun = Division(
            stages=self.stage.count,
            rows=rows,
            micro_batches=min(count, len(batches)),
            prompt=texts.tokens.shape[1],
            again=can and texts.cache.pool is None,
            tries=can and asked == "auto" and not texts.draws,
            longest=texts.longest,
        )
        return Chooser(begun, self.stage.counts, self._of_rank_0, self._tell)

    def _of_rank_0(self, number: float) -> float:
        """What the first of the ranks that share these layers has."""
        return number if self.ranks is None else float(self.ranks.gather(torch.tensor([number]))[0])

    def _tell(self, found: Compared) -> None:
        """Tells the other stages how long tokens take."""
        self.stage.send(MessageKind.COUNTS, 0, 1, found.payload, Phase.DECODE)

    def _count(self, texts: TextBatch) -> int:
        """How many micro-batches there are. Raises UserError for more than rows."""
        wanted, stages, rows = self.stage.wanted, self.stage.count, texts.rows
        asked = wanted.micro_batches
        count = stages if asked == "auto" else asked if isinstance(asked, int) else asked.prompt
        if isinstance(asked, MicroBatches) and (texts.ends is None or not _joinable(texts.cache)):
            count = asked.decode  # without `ends` only its own loop knows whether a row has ended
        if asked != "auto" and count > rows:
            raise UserError(
                f"got micro_batches={count} for a batch of {rows} row{'s' * (rows > 1)}; use at most {rows}, or 'auto'"
            )
        if wanted.schedule == "naive":
            return 1
        if rows == 1:
            self._say_once("a batch of one has one stage at work at a time; more rows would keep all stages busy")
        elif (why := texts.together) is not None:
            self._say_once(f"the batch goes through the stages in one piece, because {why}")
            return 1
        return min(count, rows)

    def _say_once(self, what: str) -> None:
        if self.stage.is_first and what not in self._said:
            log.warning("labkit: pipeline_parallel: %s", what)
        self._said.add(what)

    def _agree(self, what: str, parts: object) -> None:
        """Raises RanksDifferError, on all ranks, where they were not given the same."""
        mine = digest_of(*_flat(parts))[None] if self.ranks is None else self.ranks.gather(digest_of(*_flat(parts)))
        check_alike(what, self.stage.ring.gather(mine).flatten(0, 1))

    def _one_at_a_time(self, step: StepInput) -> StepOutput:
        """A step that all ranks begin alike."""
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
        """What comes of a piece of a step on the last stage; None on the others."""
        stage, phase, number = self.stage, step.phase, int(step.phase == Phase.DECODE)
        given = step if stage.is_first else with_rows(step, self._received(MessageKind.ROWS, phase))
        with stage.computing(phase, 0, number):
            found = self.inner.begin(given).collect()
        if stage.is_last:
            return found.result
        assert found.rows is not None
        stage.send(MessageKind.ROWS, 0, number, found.rows.flatten(0, 1), phase)
        return None

    def _received(self, kind: MessageKind, phase: Phase) -> Tensor:
        message, _ = self.stage.receive(phase)
        if message.kind != kind:
            raise RanksDifferError("another stage has gone on otherwise; all must be called with the same arguments")
        return message.payload

    def _shared(self, result: Tensor | None, step: StepInput) -> Tensor:
        """The last stage's result, on all of them."""
        stage, batch = self.stage, step.shape[0]
        if not stage.is_last:
            result = self._received(MessageKind.RESULT, step.phase).to(stage.device)
        assert result is not None
        if stage.number != stage.count - 2:  # behind which is the last
            stage.send(MessageKind.RESULT, 0, 0, result.view(result.shape[0], -1), step.phase)
        return result.view(batch, -1) if step.greedy else result.view(batch, -1, self.config.vocab_size)


def _divisible(batches: list[MicroBatch]) -> bool:
    """Whether rows can go from one micro-batch to another at little cost: their keys and values are at hand. In a file
    all of them would be written anew.
    """
    return len(batches) > 1 and all(batch.cache.elsewhere is None for batch in batches)


def _joinable(cache: KVCache) -> bool:
    """Whether several such caches can become one, for which those in the host's memory would be there twice."""
    return cache.pool is None or cache.elsewhere is None


def _flat(parts: object) -> list[object]:
    return [leaf for part in parts for leaf in _flat(part)] if isinstance(parts, list | tuple) else [parts]
