"""The study of precisions: time and quality of a token in each, and where the error comes from."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from labkit.harness.compare.compare import BUDGET_S, comparison_case
from labkit.harness.compare.interleave import take_turns
from labkit.harness.compare.plan import Schedule, SideSpec
from labkit.harness.compare.sampling import first_is_decided
from labkit.harness.comparison import Comparison
from labkit.harness.evaluation.evaluate import evaluate
from labkit.harness.evaluation.records import Evaluation
from labkit.harness.records import SCHEMA_VERSION, Measurement
from labkit.harness.results import OF_PRECISIONS, save_lines, save_or_warn
from labkit.harness.runs import FrozenRecord
from labkit.statistics.resolution import TellsApart
from labkit.studies.frames import number
from labkit.studies.last import read_study
from labkit.studies.matrix_errors import (
    MatrixError,
    Spread,
    StoredMatrices,
    head_error,
    matrix_errors,
    reason_against,
    spread_of,
)
from labkit.studies.outcome import Notes, Outcome, Study
from labkit.studies.settings import Epochs, Model, NewTokens, Question, StudySetting, Threads
from labkit.system.bounds import check_numbers
from labkit.system.comma_list import listed
from labkit.system.errors import UserError
from labkit.system.output_folder import RUNS, check_output_folder
from labkit.system.partly import Show, so_far, unseen
from labkit.system.progress import Progress, unheard
from labkit.weights.precision import STORED, precision_of
from labkit.weights.resolve import resolve
from labkit.weights.source import ModelSource

PRECISIONS = (
    "float32, bfloat16, int8+head, int8-32+head, int4-32+head8, int4-64+head8, int4-128+head8, "
    "int4-32-symmetric+head8, int4-64+head"
)
CHOICES = (  # of the exercise
    "int8", "int8-32", "int4-32", "int4-32-symmetric", "int4-64", "int4-64-symmetric", "int4-128", "int4-128-symmetric",
    "int4-row",
)  # fmt: skip
WHOLE_ROWS = "int8"  # with this choice the matrix with the largest outliers loses most
EXACT = "float32"
CLOSE = 0.01  # nats per token: a precision with at most this KL divergence is close to float32
PROMPT = 64  # tokens
WINDOW, WINDOWS = 256, 8  # most tokens of a window, and least number of windows of a short text
ERRORS, TURNS, ALL = 15, 55, 100  # percent of the work: after the errors, after the runs of all sides, at the end


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
        return _layers(self.precision)


class Refused(FrozenRecord):
    """A precision that the model cannot have."""

    precision: str
    reason: str


class PrecisionStudy(Study, FrozenRecord):
    """Result of `study_precision`."""

    kind: Literal["precision_study"] = "precision_study"
    schema_version: Literal[1] = SCHEMA_VERSION
    created: datetime = Field(default_factory=lambda: datetime.now(UTC))
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
                    "precision": side.precision,
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


def study_precision(
    *,
    model: Model = "smollm2-135m",
    precisions: Annotated[
        str,
        StudySetting(
            "names as for `labkit evaluate --dtype`; the first is the baseline",
            check=parse_precisions,
        ),
    ] = PRECISIONS,
    tokens: Annotated[int, StudySetting("tokens of the text that each precision predicts", (16, 65_536))] = 2048,
    rounds: Epochs = 0,
    new_tokens: NewTokens = 32,
    threads: Threads = 0,
    question: Question = "What is the capital of France?",
    output: str | os.PathLike[str] = RUNS,
    progress: Progress | None = None,
    show: Show = unseen,
) -> PrecisionStudy:
    """Measures the speed of the fused engine in several precisions, which take turns of a few tokens in epochs, the
    quality of each relative to float32, and the error of each stored matrix.

    A precision that the model cannot have is reported with the reason.

    - rounds: number of epochs; 0: until there is a verdict on each precision against the first, a minute at most.
    - output: folder for the record, which `load_study` reads.
    - progress: receives the progress.
    - show: receives the study with the parts that are measured so far.

    UserError as from `take_turns` and `evaluate`, and for a list without two precisions that the model can have.
    """
    check_numbers(tokens=tokens, new=new_tokens, rounds=rounds or None, threads=threads or None)
    names = parse_precisions(precisions)
    source = resolve(model)
    check_output_folder(output)
    possible, refused = _possible(source, names)
    threads = threads or torch.get_num_threads()
    torch.set_num_threads(threads)
    follow = progress or unheard
    choices = [name for name in CHOICES if reason_against(source, name) is None]
    layers = dict.fromkeys(_layers(name) for name in possible if name not in (EXACT, STORED))
    stored = matrix_errors(source, tuple(dict.fromkeys([*layers, *choices])), _part(follow, 0, ERRORS))
    known: dict[str, Any] = {"refused": refused, "stored": stored, "spread": _spread(source, stored)}
    show(so_far(PrecisionStudy, **known))
    turns = take_turns(
        [SideSpec(f"fused:{name}", threads) for name in possible],
        comparison_case(model=model, dtype=EXACT, batch=1, prompt=PROMPT, new=new_tokens, threads=threads),
        Schedule(rounds=rounds or None, budget_s=None if rounds else BUDGET_S, stages=False, question=question),
        decided=first_is_decided,
        progress=_part(follow, ERRORS, TURNS),
    )
    known |= {name: getattr(turns, name) for name in ("looks", "why_rounds", "tells_apart", "dropped_pairs")}
    timed = [
        {
            "precision": name,
            "measurement": turns.sides[index],
            "head": None if name in (EXACT, STORED) else head_error(source, name),
            "first_difference": turns.comparison(0, index).first_difference,
        }
        for index, name in enumerate(possible)
    ]
    show(so_far(PrecisionStudy, sides=tuple(so_far(PrecisionSide, **fields) for fields in timed), **known))
    if turns.interrupted:  # a study without qualities is no record, and they take as long again
        raise KeyboardInterrupt
    sides = []
    for index, name in enumerate(possible):
        begin, end = (TURNS + (ALL - TURNS) * done / len(possible) for done in (index, index + 1))
        scores = evaluate(
            model, dtype=name, tokens=tokens, window=window_of(tokens), threads=threads,
            progress=_part(follow, begin, end, f"{name}: "),
        )  # fmt: skip
        sides.append(PrecisionSide(evaluation=scores, **timed[index]))
    study = PrecisionStudy(sides=tuple(sides), **known)
    save_or_warn(study, output, save_study)
    follow(ALL, ALL, "done")
    return study


def parse_precisions(text: str) -> tuple[str, ...]:
    """The names in "float32, int8-32+head", each once. UserError for fewer than two names, and for unknown names."""
    names = listed(text)
    for name in names:
        precision_of(name)
    if len(names) < 2:
        raise UserError(f"got precisions = {text!r}, expected two or more, such as 'float32, int8-32+head'")
    return names


def window_of(tokens: int) -> int:
    """Tokens of a window of a text: fewer for a short text, so that there are enough windows for an interval."""
    return max(2, min(WINDOW, tokens // WINDOWS))


def save_study(study: PrecisionStudy, folder: str | os.PathLike[str]) -> Path:
    """Writes the study to a new file under `folder`, whole or not at all, and returns its path.

    SaveError as for `save`.
    """
    model = Path(study.first.measurement.case.model).name
    return save_lines(Path(folder) / f"{study.created:%Y%m%dT%H%M%S%f}-{model}{OF_PRECISIONS}", [study])


def load_study(path: str | os.PathLike[str]) -> PrecisionStudy:
    """The study in a file from `save_study`. UserError if the file holds no such record."""
    return read_study(PrecisionStudy, path)


def _possible(source: ModelSource, names: Sequence[str]) -> tuple[list[str], tuple[Refused, ...]]:
    reasons = {name: reason_against(source, name) for name in names}
    possible = [name for name, reason in reasons.items() if reason is None]
    refused = tuple(Refused(precision=name, reason=reason) for name, reason in reasons.items() if reason)
    if len(possible) < 2:
        reasons_text = "; ".join(f"{refusal.precision}: {refusal.reason}" for refusal in refused)
        raise UserError(
            f"got {len(possible)} precisions that {source.name} can have, expected two or more ({reasons_text})"
        )
    return possible, refused


def _layers(precision: str) -> str:
    return precision.partition("+")[0]


def _spread(source: ModelSource, stored: Sequence[StoredMatrices]) -> Spread:
    (rows,) = (matrices for matrices in stored if matrices.precision == WHOLE_ROWS)
    worst = max(rows.errors, key=lambda matrix: matrix.error)
    assert worst.layer is not None
    return spread_of(source, worst.layer, worst.matrix)


def _part(follow: Progress, begin: float, end: float, prefix: str = "") -> Progress:
    """The progress of a part of the work that goes from `begin` to `end` percent."""
    return lambda done, total, label: follow(begin + (end - begin) * done / max(total, 1), ALL, prefix + label)
