"""Record of a study of a mixture of experts: what rows choose, what steps read, and what the choice costs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from labkit.harness.environment import Environment
from labkit.harness.expert_reads import ExpertReads
from labkit.harness.frozen_record import FrozenRecord, ResultRecord
from labkit.harness.results import save_lines
from labkit.harness.turns.call_record import CallRecord
from labkit.kernels.shapes import ExpertsShape
from labkit.statistics import Trust
from labkit.studies.last import read_study
from labkit.studies.outcome import Notes, Outcome, Study
from labkit.system.home import expanded

ENDING = "-experts.json"


class StudiedMixture(FrozenRecord):
    """What was studied. skew: of the router, see `study_experts`."""

    model: str
    origin: str
    dtype: str
    threads: int
    skew: float
    prompt_tokens: int
    new_tokens: int


class ReadByBatch(FrozenRecord):
    """The experts that decode steps of a batch read, in each layer on average over the steps, and their time."""

    batch: int
    by_layer: tuple[float, ...]
    experts_ms: float  # of a step, in all layers
    sums_ms: float  # of a step, in the sums of several ranks: waiting for the others, and adding
    step_ms: float

    @property
    def read(self) -> float:
        """Experts of a layer that a step reads."""
        return float(np.mean(self.by_layer))


class RankOfExperts(FrozenRecord):
    """A rank of several, with the experts from `first` to before `end`."""

    first: int
    end: int
    steps: ReadByBatch


class ExpertsInMemory(FrozenRecord):
    """Decode steps of one sequence with some of the experts in memory and the others on the disk."""

    experts: int  # that memory holds, of all layers
    of: int  # experts of all layers
    step_ms: float
    wait_ms: float  # of a step, waiting for experts
    read_mb: float  # of a token
    reads: ExpertReads  # of the steps
    disk_gb_s: float

    @property
    def name(self) -> str:
        return f"{self.experts / self.of:.0%} of the experts"

    @property
    def least_ms(self) -> float:
        """The disk's time for what a token reads."""
        return self.read_mb / self.disk_gb_s


class TimedPair(CallRecord):
    """Two ways to do the same, the slow one first."""

    @property
    def judged(self) -> tuple[str, str]:
        slow, fast = self.rounds_us
        return slow, fast

    @property
    def trust(self) -> Trust:
        return self.trust_of(self.gain)


class ExpertsStudy(Study, ResultRecord):
    """Result of `study_experts`.

    counts: rows of the text that chose each expert, by layer.
    chosen: experts of each new token, [layer][token][choice].
    sparse: a dense MLP against the experts of one row, which read as many bytes.
    routing: one-hot products against a table.
    ranks: by rank, the same model divided among them; empty: it was not.
    on_disk: steps with some of the experts in memory; empty: not measured.
    """

    kind: Literal["experts_study"] = "experts_study"
    of: StudiedMixture
    environment: Environment
    experts: int
    of_a_row: int
    expert_bytes: int  # of one expert's matrices
    counts: tuple[tuple[int, ...], ...]
    chosen: tuple[tuple[tuple[int, ...], ...], ...]
    reads: tuple[ReadByBatch, ...] = Field(min_length=1)
    sparse: TimedPair
    routing: TimedPair
    routed_rows: int
    ranks: tuple[RankOfExperts, ...]
    on_disk: tuple[ExpertsInMemory, ...] = ()

    def expected(self, rows: int) -> float:
        """Number of experts of a layer that `rows` rows read on average if all choices are equally likely."""
        return ExpertsShape(self.experts, self.of_a_row).read(rows)

    @property
    def right_guesses(self) -> tuple[float, ...]:
        """The least and the largest share of right guesses with experts on the disk; empty without any."""
        shares = [point.reads.accuracy for point in self.on_disk if point.reads.accuracy is not None]
        return (min(shares), max(shares)) if shares else ()

    @property
    def busiest(self) -> list[float]:
        """Share of a layer's choices that goes to its busiest eighth of the experts, by layer."""
        counts = np.sort(np.asarray(self.counts), axis=1)[:, ::-1]
        shares: list[float] = (counts[:, : self._eighth].sum(1) / counts.sum(1)).tolist()
        return shares

    @property
    def _eighth(self) -> int:
        return max(1, self.experts // 8)

    @property
    def notes(self) -> Notes:
        """The result on the points that the notebook asks a reader to notice."""
        few, one, most, busiest = self._eighth, self.reads[0], self.reads[-1], self.busiest
        sentences: tuple[str, ...] = (
            f"The busiest {few} of {self.experts} experts got {busiest[0]:.0%} of the choices in the first layer, and "
            f"{busiest[-1]:.0%} in the last. Even choices would give them {few / self.experts:.0%}.",
            f"A step of batch {one.batch} read {one.read:.1f} of {self.experts} experts of a layer, and one of batch "
            f"{most.batch} {most.read:.1f}; even choices would read {self.expected(most.batch):.1f}.",
        )
        if self.ranks:
            waiting = max(self.ranks, key=lambda rank: rank.steps.sums_ms).steps
            read = " and ".join(f"{rank.steps.read:.1f}" for rank in self.ranks)
            sentences += (
                f"The ranks read {read} experts of a layer. The longest time in their sums, with the wait for others, "
                f"was {waiting.sums_ms / waiting.step_ms:.0%} of a step.",
            )
        if self.on_disk:
            fewest, more = self.on_disk[0], self.on_disk[-1]
            sentences += (
                f"With {fewest.name} in memory a token took {fewest.step_ms:.3g} ms, of which it waited "
                f"{fewest.wait_ms / fewest.step_ms:.0%} for the disk, and with {more.name} {more.step_ms:.3g} ms.",
            )
        pairs = (self.sparse, self.routing)
        doubts = dict.fromkeys(pair.trust.sentence for pair in pairs if not pair.trust.trustworthy)
        return Notes(sentences, tuple(doubts))

    def case(self) -> dict[str, Any]:
        return self.of.model_dump(exclude={"origin"})

    def rows(self) -> list[dict[str, Any]]:
        """A row for each batch."""
        return [
            {
                "batch": read.batch,
                "experts_read": read.read,
                "even_choices": self.expected(read.batch),
                "read_mb": read.read * self.expert_bytes / 1e6,
                "experts_ms": read.experts_ms,
                "step_ms": read.step_ms,
            }
            for read in self.reads
        ]

    @property
    def claim(self) -> str:
        """The gain of a table over one-hot products, with the interval."""
        routing, (slow, fast) = self.routing, self.routing.judged
        return f"{self.of.model}: {fast} against {slow}, {self.routed_rows} rows: {routing.gain} {routing.verdict}"

    @property
    def headline(self) -> str:
        return self.routing.trust.explained(self.claim)

    @property
    def outcome(self) -> Outcome:
        return Outcome.graded(self.claim, self.routing.trust, self.environment.machine)


def save_study(study: ExpertsStudy, folder: str | os.PathLike[str]) -> Path:
    """Writes the study to a new file under `folder`, whole or not at all, and returns its path.

    SaveError as for `save`.
    """
    model = Path(study.of.model).name
    return save_lines(expanded(folder) / f"{study.created:%Y%m%dT%H%M%S%f}-{model}{ENDING}", [study])


def load_study(path: str | os.PathLike[str]) -> ExpertsStudy:
    """The study in a file from `save_study`. UserError if the file holds no such record."""
    return read_study(ExpertsStudy, path)
