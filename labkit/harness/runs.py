"""Records of a case and of the runs of one side: whole generations, or epochs of turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import numpy as np

from labkit.harness.expert_reads import ExpertReads
from labkit.harness.frozen_record import FrozenRecord
from labkit.harness.roofline import Work
from labkit.harness.timing import Times
from labkit.statistics.summaries import median_of

MOSTLY = 0.9  # share of the weights from which on all of them count as placed anew, or as shared


class Case(FrozenRecord):
    """Model, sizes and processors of a generation. Functions that measure take it, and records keep it."""

    model: str
    origin: str = ""  # source of the weights; empty until it is resolved
    dtype: str
    batch: int
    prompt_tokens: int
    new_tokens: int
    threads: int  # of each rank
    tp: int = 1  # ranks of each stage
    pp: int = 1  # stages
    schedule: str = ""  # of the stages; empty for one stage
    memory_gb: float | None = None  # 1e9 bytes that each side may take beyond its imports; None: no limit
    sample: str = ""  # settings of sampling, as `sample_text` gives them; empty: greedy search

    @property
    def ranks(self) -> int:
        return self.tp * self.pp

    @property
    def cores(self) -> int:
        """The processors that the threads of all ranks keep busy, on a CPU."""
        return self.threads * self.ranks

    @property
    def title(self) -> str:
        """The case in a line."""
        limit = "" if self.memory_gb is None else f", {self.memory_gb:g} GB of memory"
        sampled = self.sample and f", sampled with {self.sample}"
        sizes = f"batch {self.batch}, {self.prompt_tokens} + {self.new_tokens} tokens"
        return f"{self.model}, {self.dtype}, {sizes}{sampled}{limit}"


class SharedWeights(FrozenRecord):
    """Weights that both sides of a comparison read from the same pages of memory. MB are 10^6 bytes."""

    shared_mb: float
    total_mb: float  # of the candidate's large tensors
    why_not: str = ""  # why nothing is shared

    @property
    def mostly(self) -> bool:
        """Whether so much is shared that the place of the weights favours no side."""
        return self.shared_mb >= MOSTLY * self.total_mb > 0

    def __str__(self) -> str:
        if self.why_not:
            return f"each side reads its own copy of the weights: {self.why_not}"
        return f"both sides read the same {self.shared_mb:,.0f} of {self.total_mb:,.0f} MB of weights"


class TokenTurn(FrozenRecord):
    """A few decode steps of a side in one go, with a turn of each other side and a probe of the memory next to it.

    The first step meets cold caches and sleeping threads, as no step of an unbroken generation does, so it is kept
    apart.
    """

    pair: int  # number in the epoch; the turns of all sides with this number belong together
    place: int  # in the order of the pair, which is random
    at_s: float  # since the first epoch began
    first_step_ms: float
    step_ms: float  # median of the other steps; in records from before 2026-11-29 their mean
    bandwidth_gb_s: float | None = None  # read bandwidth, probed in this pair; None: no probe
    further_tokens: float = 0.0  # by which its context is longer than that of a generation's average step


class Run(FrozenRecord):
    """One timed generation, or one epoch: generations that pause between `turns`, with weights that stay in one place.

    In an epoch `decode_ms` has all steps of its turns except the first step of each. `ttft_ms` is the median of
    `prompts_ms`; an epoch in which no prompt began has the `ttft_ms` of the epoch before. `end_to_end_ms` is the first
    token and the steps after it at the epoch's time per token.

    Only a side with limited memory that reads files has the last two fields. The files are made cold before the run,
    but pages that the side maps stay in the page cache.
    """

    round: int
    ttft_ms: float
    decode_ms: tuple[float, ...]
    end_to_end_ms: float
    turns: tuple[TokenTurn, ...] = ()
    prompts_ms: tuple[float, ...] = ()  # first tokens of an epoch's generations
    bandwidth_gb_s: tuple[float, float] | None = None  # read bandwidth just before and after the run; None: no probe
    others_cores: float | None = None  # processors that other programs kept busy; None: not sampled, or too short
    disk_gb_s: tuple[float, float] | None = None  # rate of the files' disk just before and after the run
    cached_mb: float | None = None  # of the files, in the page cache before the run
    experts: ExpertReads | None = None  # of an engine with experts on the disk: of the steps after the first token

    @classmethod
    def of(cls, times: Times, *, round: int, before: float | None, after: float | None) -> Run:
        probes = None if before is None or after is None else (before, after)
        return cls(round=round, bandwidth_gb_s=probes, **asdict(times))

    @classmethod
    def of_epoch(
        cls,
        turns: Sequence[TokenTurn],
        *,
        round: int,
        first_ms: float,
        prompts_ms: Sequence[float],
        decode_ms: Sequence[float],
        new_tokens: int,
    ) -> Run:
        """The epoch with these turns. `first_ms`: the typical first token; `prompts_ms`: its own first tokens;
        `decode_ms`: its steps, as this class keeps them; `new_tokens`: of a whole generation.
        """
        step_ms = float(np.median([turn.step_ms for turn in turns]))
        return cls(
            round=round,
            ttft_ms=first_ms,
            decode_ms=tuple(decode_ms),
            end_to_end_ms=first_ms + (new_tokens - 1) * step_ms,
            turns=tuple(turns),
            prompts_ms=tuple(prompts_ms),
        )

    @property
    def has_prompt(self) -> bool:
        """Whether a first token was timed in this run; an epoch may go on with the generation of the epoch before."""
        return bool(self.prompts_ms or not self.turns)

    def disk_share(self, streamed_mb: float) -> float | None:
        """The disk's time for what the steps read / the time of the steps; None if nothing is read or no rate is known.

        streamed_mb: of layers that every step reads.
        """
        if self.disk_gb_s is None or not (self.experts or streamed_mb):
            return None
        rate = float(np.mean(self.disk_gb_s))
        if self.experts is not None:  # the steps read different numbers of them
            return self.experts.needed_mb / rate / sum(self.decode_ms)
        return streamed_mb / rate / self.per_token_ms

    @property
    def per_token_ms(self) -> float:
        """Median decode step of this run; of an epoch the median of its turns."""
        return float(np.median([turn.step_ms for turn in self.turns] or self.decode_ms))

    @property
    def probes_gb_s(self) -> tuple[float, ...]:
        """Read bandwidths that were probed around this run, or between its turns."""
        probed = [turn.bandwidth_gb_s for turn in self.turns if turn.bandwidth_gb_s is not None]
        return tuple(probed) or self.bandwidth_gb_s or ()

    def floor_share(self, work: Work, peak_gflop_s: float | None = None) -> float | None:
        """Share of the limit of a decode step: the least time that the memory around this run and the processor allowed
        / the measured time. An epoch has the median over its turns, each with the probe of its pair.
        """
        shares = [
            work.floor_ms(turn.bandwidth_gb_s, peak_gflop_s, turn.further_tokens) / turn.step_ms
            for turn in self.turns
            if turn.bandwidth_gb_s is not None
        ]
        if not shares and self.bandwidth_gb_s is not None:
            shares = [work.floor_ms(float(np.mean(self.bandwidth_gb_s)), peak_gflop_s) / self.per_token_ms]
        return median_of(shares)

    def prompt_share(self, work: Work, peak_gflop_s: float) -> float | None:
        """Share of the limit of the first token."""
        if not self.probes_gb_s:
            return None
        return work.prompt_floor_ms(float(np.mean(self.probes_gb_s)), peak_gflop_s) / self.ttft_ms
