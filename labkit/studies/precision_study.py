"""Record of a study of precisions: time and quality of a token in each, and where the error comes from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from labkit.harness.comparison import Comparison
from labkit.harness.evaluation.records import Evaluation
from labkit.harness.frozen_record import FrozenRecord, ResultRecord
from labkit.harness.records import Measurement
from labkit.harness.results import OF_PRECISIONS, save_lines
from labkit.statistics.resolution import TellsApart
from labkit.studies.frames import number
from labkit.studies.last import read_study
from labkit.studies.matrix_errors import MatrixError, Spread, StoredMatrices
from labkit.studies.outcome import Notes, Outcome, Study
from labkit.system.home import expanded

CLOSE = 0.01  # nats per token: a precision with at most this KL divergence is close to float32


class PrecisionSide(FrozenRecord):
    """The measurements of one precision."""

    precision: str
    measurement: Measurement
    evaluation: Evaluation
    head: MatrixError | None  # None: no error, because the head is stored as in the model
    first_difference: int | None  # position of the first token that differs from the first side's; None: no difference

    @property
    def layers(self) -> str:
        """The name of the precision of the layers' matrices."""
        return layers_of(self.precision)


class Refused(FrozenRecord):
    """A precision that the model cannot have."""

    precision: str
    reason: str


class PrecisionStudy(Study, ResultRecord):
    """Result of `study_precision`."""

    kind: Literal["precision_study"] = "precision_study"
    sides: tuple[PrecisionSide, ...] = Field(min_length=2)  # in the requested order; the first is the baseline
    refused: tuple[Refused, ...] = ()
    stored: tuple[StoredMatrices, ...] = Field(min_length=1)  # precisions of the sides' layers and of the exercise
    spread: Spread  # of the matrix with the largest error in whole rows
    looks: tuple[int, ...] = ()  # of the comparisons: rounds or epochs after which the verdicts were checked
    why_rounds: str = ""  # of the comparisons: why the sides took no turns of tokens
    tells_apart: TellsApart | None = None  # by the machine; smaller differences count as none
    dropped_pairs: int = 0  # of turns, because the clock of the machine jumped

    @property
    def first(self) -> PrecisionSide:
        return self.sides[0]

    @property
    def trained(self) -> bool:
        """Whether the model is trained, so that its perplexity is meaningful."""
        return self.first.evaluation.trained

    @property
    def by_time(self) -> tuple[PrecisionSide, ...]:
        """The sides, the fastest first."""
        return tuple(sorted(self.sides, key=lambda side: side.measurement.per_token_ms))

    @property
    def front(self) -> tuple[PrecisionSide, ...]:
        """The sides that no other side beats on both speed and closeness to the reference, the fastest first."""
        front: list[PrecisionSide] = []
        for side in self.by_time:
            if not front or side.evaluation.kl.value < front[-1].evaluation.kl.value:
                front.append(side)
        return tuple(front)

    @property
    def comparisons(self) -> dict[str, Comparison]:
        """The comparison of each other side with the first, by precision."""
        return {side.precision: self.comparison(side) for side in self.sides[1:]}

    def comparison(self, side: PrecisionSide) -> Comparison:
        """The comparison of a side with the first."""
        return Comparison(
            baseline=self.first.measurement,
            candidate=side.measurement,
            tokens_equal=side.first_difference is None,
            first_difference=side.first_difference,
            looks=self.looks,
            why_rounds=self.why_rounds,
            tells_apart=self.tells_apart,
            dropped_pairs=self.dropped_pairs,
        )

    def matrices(self, side: PrecisionSide) -> StoredMatrices | None:
        """The errors of a side's layers; None: no error, because they are stored as in the model."""
        return next((matrices for matrices in self.stored if matrices.precision == side.layers), None)

    @property
    def exact(self) -> tuple[str, ...]:
        """The precisions that store these weights in fewer bits without an error."""
        return tuple(matrices.precision for matrices in self.stored if matrices.exact)

    @property
    def recommended(self) -> PrecisionSide:
        """The fastest precision that is close to float32; if none is close, the fastest. Never the first side."""
        others = [side for side in self.by_time if side is not self.first]
        return next((side for side in others if side.evaluation.kl.value <= CLOSE), others[0])

    @property
    def notes(self) -> Notes:
        """The result on the points that the notebook asks a reader to notice."""
        front = ", ".join(f"`{side.precision}`" for side in self.front)
        sentences = [f"Nothing here is both faster and closer to float32 than {front}."]
        if self.exact:
            exact = " and ".join(f"`{name}`" for name in self.exact)
            sentences.append(
                f"**{exact} loses nothing of the layers, because these weights were such codes before.** For a model "
                "trained in 16 bits the same codes lose, as the others do here: this model shows the cost of a token "
                "in them, and not its quality."
            )
        if not self.trained:
            sentences.append(
                "The weights are random: perplexity means nothing, and is left out. KL still tells how far the stored "
                "weights change the model's output; it differs for trained weights."
            )
        if self.spread.group_median:
            spread = self.spread
            sentences.append(
                f"In {spread.matrix} of layer {spread.layer}, the scale of a typical row has to reach "
                f"{number(spread.row_median)} standard deviations, that of a typical group "
                f"{number(spread.group_median)}: with the same bits, its steps are "
                f"{spread.row_median / spread.group_median:.1f} times as fine."
            )
        grades = [comparison.trust() for comparison in self.comparisons.values()]
        doubts = dict.fromkeys(trust.sentence for trust in grades if not trust.trustworthy)
        return Notes(tuple(sentences), tuple(doubts))

    def case(self) -> dict[str, Any]:
        return self.first.measurement.case.model_dump(exclude={"dtype"})

    def rows(self) -> list[dict[str, Any]]:
        """A row for each precision."""
        rows = []
        for side in self.sides:
            comparison = None if side is self.first else self.comparison(side)
            speed = None if comparison is None else comparison.ratio("per_token")
            rows.append(
                {
                    "dtype": side.precision,
                    "per_token_ms": side.measurement.per_token_ms,
                    "times_faster": speed and speed.value,
                    "low": speed and speed.low,
                    "high": speed and speed.high,
                    "trustworthy": comparison and comparison.trust().trustworthy,
                    "weight_mb": side.evaluation.weight_bytes / 1e6,
                    "kl": side.evaluation.kl.value,
                    "perplexity": side.evaluation.perplexity.value if self.trained else None,
                    "agreement": side.evaluation.agreement.value,
                }
            )
        return rows

    @property
    def claim(self) -> str:
        """The gain of the recommended precision over the first, with the interval, and its cost in quality."""
        side = self.recommended
        claim, scores, case = self.comparison(side).claim(), side.evaluation, side.measurement.case
        cost = f"KL {scores.kl.value:.2g}"
        if self.trained:
            reference = f"{scores.case.against} {scores.reference_perplexity.value:.2f}"
            cost = f"perplexity {scores.perplexity.value:.2f}, {reference}; {cost}"
        return f"{case.model}: {side.precision} against {self.first.precision}, per token: {claim}; {cost}"

    @property
    def headline(self) -> str:
        """The claim, and its grade."""
        return self.comparison(self.recommended).trust().explained(self.claim)

    @property
    def outcome(self) -> Outcome:
        trust, machine = self.comparison(self.recommended).trust(), self.first.measurement.environment.machine
        return Outcome.graded(self.claim, trust, machine)


def save_study(study: PrecisionStudy, folder: str | os.PathLike[str]) -> Path:
    """Writes the study to a new file under `folder`, whole or not at all, and returns its path.

    SaveError as for `save`.
    """
    model = Path(study.first.measurement.case.model).name
    return save_lines(expanded(folder) / f"{study.created:%Y%m%dT%H%M%S%f}-{model}{OF_PRECISIONS}", [study])


def load_study(path: str | os.PathLike[str]) -> PrecisionStudy:
    """The study in a file from `save_study`. UserError if the file holds no such record."""
    return read_study(PrecisionStudy, path)


def layers_of(precision: str) -> str:
    """The part of a precision's name that is about the layers."""
    return precision.partition("+")[0]
