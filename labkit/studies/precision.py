"""What a notebook shows of precisions: what a token costs in each, what it is worth, and where the error sits."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, ValidationError

from labkit.harness.compare.baselines import IN_PRECISION
from labkit.harness.compare.interleave import take_turns
from labkit.harness.compare.plan import Schedule, SideSpec
from labkit.harness.compare.versus import comparison_case
from labkit.harness.comparison import Comparison
from labkit.harness.evaluation.evaluate import evaluate
from labkit.harness.evaluation.records import Evaluation
from labkit.harness.records import SCHEMA_VERSION, FrozenRecord, Measurement
from labkit.harness.results import OF_PRECISIONS, SaveError, save_lines
from labkit.studies.matrix_errors import (
    MatrixError,
    Spread,
    StoredMatrices,
    head_error,
    matrix_errors,
    reason_against,
    spread_of,
)
from labkit.studies.outcome import Outcome, Study
from labkit.system.bounds import check_numbers
from labkit.system.errors import UserError
from labkit.system.output_folder import RUNS, check_output_folder
from labkit.system.partly import Show, so_far, unseen
from labkit.system.progress import Progress, unheard
from labkit.system.validation import first_problem
from labkit.weights.precision import STORED, precision_of
from labkit.weights.resolve import resolve
from labkit.weights.source import ModelSource

PRECISIONS = (
    "float32, bfloat16, int8+head, int8-32+head, int4-32+head8, int4-64+head8, int4-128+head8, "
    "int4-32-symmetric+head8, int4-64+head"
)
CHOICES = (  # those of the exercise
    "int8", "int8-32", "int4-32", "int4-32-symmetric", "int4-64", "int4-64-symmetric", "int4-128", "int4-128-symmetric",
    "int4-row",
)  # fmt: skip
WHOLE_ROWS = "int8"  # the choice that shows which matrix has the largest outliers
EXACT = "float32"
CLOSE = 0.01  # nats a token: a precision that moved the answers no further is close to float32
PROMPT = 64  # tokens
WINDOW, WINDOWS = 256, 8  # tokens of a window at most, and how many windows of a short text there are instead
ERRORS, TURNS, ALL = 15, 55, 100  # of the work in percent: when the errors are known, and when all sides have run


class PrecisionSide(FrozenRecord):
    """What was found of one precision. first_difference: from the first side's tokens; None: there is none."""

    precision: str
    measurement: Measurement
    evaluation: Evaluation
    head: MatrixError | None  # None: nothing is lost, because it is stored as the model has it
    first_difference: int | None

    @property
    def layers(self) -> str:
        """The name of how the layers' matrices are stored."""
        return _layers(self.precision)


class Refused(FrozenRecord):
    """A precision that the model cannot have."""

    precision: str
    reason: str


class PrecisionStudy(Study, FrozenRecord):
    """What `study_precision` found.

    sides: in the order that was asked for; the others' ratios are against the first. stored: how much the ways to store
    the layers lose, those of the sides and those of the exercise. spread: of the matrix that loses most in whole rows.
    """

    kind: Literal["precision_study"] = "precision_study"
    schema_version: Literal[1] = SCHEMA_VERSION
    created: datetime = Field(default_factory=lambda: datetime.now(UTC))
    sides: tuple[PrecisionSide, ...] = Field(min_length=2)
    refused: tuple[Refused, ...] = ()
    stored: tuple[StoredMatrices, ...] = Field(min_length=1)
    spread: Spread

    @property
    def first(self) -> PrecisionSide:
        return self.sides[0]

    @property
    def trained(self) -> bool:
        """Whether perplexity means anything."""
        return self.first.evaluation.trained

    @property
    def by_time(self) -> tuple[PrecisionSide, ...]:
        """The sides, the fastest first."""
        return tuple(sorted(self.sides, key=lambda side: side.measurement.per_token_ms))

    @property
    def front(self) -> tuple[PrecisionSide, ...]:
        """The sides than which none is both faster and closer to the reference, the fastest first."""
        found: list[PrecisionSide] = []
        for side in self.by_time:
            if not found or side.evaluation.kl.value < found[-1].evaluation.kl.value:
                found.append(side)
        return tuple(found)

    @property
    def comparisons(self) -> dict[str, Comparison]:
        """Each side but the first against it, by precision."""
        return {side.precision: self.comparison(side) for side in self.sides[1:]}

    def comparison(self, side: PrecisionSide) -> Comparison:
        """A side against the first one."""
        return Comparison(
            baseline=self.first.measurement,
            candidate=side.measurement,
            tokens_equal=side.first_difference is None,
            first_difference=side.first_difference,
        )

    def matrices(self, side: PrecisionSide) -> StoredMatrices | None:
        """What its layers lose; None: nothing, because they are stored as the model has them."""
        return next((each for each in self.stored if each.precision == side.layers), None)

    @property
    def exact(self) -> tuple[str, ...]:
        """The ways to store the layers in fewer bits that lose nothing on these weights."""
        return tuple(each.precision for each in self.stored if each.exact)

    @property
    def recommended(self) -> PrecisionSide:
        """The fastest precision that is close to float32, or of all where none is; the first is not among them."""
        others = [side for side in self.by_time if side is not self.first]
        return next((side for side in others if side.evaluation.kl.value <= CLOSE), others[0])

    def case(self) -> dict[str, Any]:
        return self.first.measurement.case.model_dump(exclude={"dtype"})

    def rows(self) -> list[dict[str, Any]]:
        """A row for each precision."""
        rows = []
        for side in self.sides:
            found = None if side is self.first else self.comparison(side)
            speed = None if found is None else found.ratio("per_token")
            rows.append(
                {
                    "precision": side.precision,
                    "per_token_ms": side.measurement.per_token_ms,
                    "times_faster": speed and speed.value,
                    "low": speed and speed.low,
                    "high": speed and speed.high,
                    "trustworthy": found and found.trust().trustworthy,
                    "weight_mb": side.evaluation.weight_bytes / 1e6,
                    "kl": side.evaluation.kl.value,
                    "perplexity": side.evaluation.perplexity.value if self.trained else None,
                    "agreement": side.evaluation.agreement.value,
                }
            )
        return rows

    @property
    def claim(self) -> str:
        """What the recommended precision gains over the first, with the interval, and what that costs."""
        side = self.recommended
        found, scores, case = self.comparison(side), side.evaluation, side.measurement.case
        worth = f"KL {scores.kl.value:.2g}"
        if self.trained:
            worth = f"perplexity {scores.perplexity.value:.2f}, {scores.case.against} {_reference(scores):.2f}; {worth}"
        return f"{case.model}: {side.precision} against {self.first.precision}, per token: {found.claim()}; {worth}"

    @property
    def headline(self) -> str:
        """The claim, and its grade."""
        return self.comparison(self.recommended).trust().explained(self.claim)

    @property
    def outcome(self) -> Outcome:
        trust, machine = self.comparison(self.recommended).trust(), self.first.measurement.environment.machine
        return Outcome.graded(self.claim, trust, machine)


def study_precision(
    model: str = "smollm2-135m",
    precisions: str = PRECISIONS,
    *,
    tokens: int = 2048,
    new: int = 32,
    rounds: int = 6,
    threads: int | None = None,
    question: str = "",
    output: str | os.PathLike[str] = RUNS,
    progress: Progress | None = None,
    show: Show = unseen,
) -> PrecisionStudy:
    """Measures the fused engine in each precision of a list such as "float32, int8-32+head", all in the same rounds,
    lets each predict `tokens` tokens of a text beside float32, and finds what storing each matrix loses.

    threads: None: as many as torch would use. question: each side answers it once, if the model holds conversations.
    A precision that the model cannot have is reported with the reason. The record is written under `output`, a file
    for `load_study`. show: given the study of what is measured so far.

    UserError as from `take_turns` and `evaluate`, and for a list without two precisions that the model can have.
    """
    check_numbers(tokens=tokens, new=new, rounds=rounds, threads=threads)
    names = parse_precisions(precisions)
    source = resolve(model)
    check_output_folder(output)
    possible, refused = _possible(source, names)
    threads = torch.get_num_threads() if threads is None else threads
    torch.set_num_threads(threads)
    follow = progress or unheard
    choices = [name for name in CHOICES if reason_against(source, name) is None]
    layers = dict.fromkeys(_layers(name) for name in possible if name not in (EXACT, STORED))
    stored = matrix_errors(source, tuple(dict.fromkeys([*layers, *choices])), _part(follow, 0, ERRORS))
    known: dict[str, Any] = {"refused": refused, "stored": stored, "spread": _spread(source, stored)}
    show(so_far(PrecisionStudy, **known))
    turns = take_turns(
        [SideSpec(IN_PRECISION + name, threads) for name in possible],
        comparison_case(model=model, dtype=EXACT, batch=1, prompt=PROMPT, new=new, threads=threads),
        Schedule(rounds=rounds, stages=False, question=question),
        progress=_part(follow, ERRORS, TURNS),
    )
    timed = [
        {
            "precision": name,
            "measurement": turns.sides[index],
            "head": None if name in (EXACT, STORED) else head_error(source, name),
            "first_difference": turns.comparison(0, index).first_difference,
        }
        for index, name in enumerate(possible)
    ]
    show(so_far(PrecisionStudy, sides=tuple(so_far(PrecisionSide, **each) for each in timed), **known))
    sides = []
    for index, name in enumerate(possible):
        begin, end = (TURNS + (ALL - TURNS) * done / len(possible) for done in (index, index + 1))
        scores = evaluate(
            model, dtype=name, tokens=tokens, window=window_of(tokens), threads=threads,
            progress=_part(follow, begin, end, f"{name}: "),
        )  # fmt: skip
        sides.append(PrecisionSide(evaluation=scores, **timed[index]))
    found = PrecisionStudy(sides=tuple(sides), **known)
    try:
        save_study(found, output)
    except SaveError as error:
        warnings.warn(str(error), stacklevel=2)
    follow(ALL, ALL, "done")
    return found


def parse_precisions(text: str) -> tuple[str, ...]:
    """The names in "float32, int8-32+head", each once. UserError for fewer than two, and for one that is unknown."""
    names = tuple(dict.fromkeys(name for part in text.split(",") if (name := part.strip())))
    for name in names:
        precision_of(name)
    if len(names) < 2:
        raise UserError(f"got precisions = {text!r}, expected two or more, such as 'float32, int8-32+head'")
    return names


def window_of(tokens: int) -> int:
    """Tokens of a window of a text: of a short one less, so that there are enough windows for an interval."""
    return max(2, min(WINDOW, tokens // WINDOWS))


def save_study(study: PrecisionStudy, folder: str | os.PathLike[str]) -> Path:
    """Writes it as a file of its own under `folder`, whole or not at all; returns its path. SaveError as for `save`."""
    model = Path(study.first.measurement.case.model).name
    return save_lines(Path(folder) / f"{study.created:%Y%m%dT%H%M%S%f}-{model}{OF_PRECISIONS}", [study])


def load_study(path: str | os.PathLike[str]) -> PrecisionStudy:
    """What `save_study` wrote. UserError for a file that holds no such record."""
    try:
        return PrecisionStudy.model_validate_json(Path(path).read_text(encoding="utf-8"))
    except ValidationError as error:
        raise UserError(
            f"{path} is no study of precisions of schema version {SCHEMA_VERSION}: {first_problem(error, 'the file')}; "
            "run the notebook again"
        ) from None


def _possible(source: ModelSource, names: Sequence[str]) -> tuple[list[str], tuple[Refused, ...]]:
    reasons = {name: reason_against(source, name) for name in names}
    possible = [name for name, reason in reasons.items() if reason is None]
    refused = tuple(Refused(precision=name, reason=reason) for name, reason in reasons.items() if reason)
    if len(possible) < 2:
        why = "; ".join(f"{each.precision}: {each.reason}" for each in refused)
        raise UserError(f"got precisions of which {source.name} can have {len(possible)}, expected two or more ({why})")
    return possible, refused


def _layers(precision: str) -> str:
    return precision.partition("+")[0]


def _spread(source: ModelSource, stored: Sequence[StoredMatrices]) -> Spread:
    (rows,) = (each for each in stored if each.precision == WHOLE_ROWS)
    worst = max(rows.errors, key=lambda each: each.error)
    assert worst.layer is not None
    return spread_of(source, worst.layer, worst.matrix)


def _reference(scores: Evaluation) -> float:
    return scores.reference_perplexity.value


def _part(follow: Progress, begin: float, end: float, prefix: str = "") -> Progress:
    """Who follows a part of the work that goes from `begin` to `end` percent."""
    return lambda done, total, label: follow(begin + (end - begin) * done / max(total, 1), ALL, prefix + label)
