"""The study of precisions: time and quality of a token in each, and where the error comes from."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated, Any

import torch

from labkit.engine.team_size import team_size
from labkit.harness.compare.compare import BUDGET_S, comparison_case
from labkit.harness.compare.interleave import take_turns
from labkit.harness.compare.plan import Schedule, SideSpec
from labkit.harness.compare.sampling import Turns, first_is_decided
from labkit.harness.evaluation.evaluate import evaluate
from labkit.harness.results import save_or_warn
from labkit.studies.matrix_errors import Spread, StoredMatrices, head_error, matrix_errors, reason_against, spread_of
from labkit.studies.precision_study import PrecisionSide, PrecisionStudy, Refused, layers_of, save_study
from labkit.studies.settings import Epochs, Model, NewTokens, Question, StudySetting, Threads
from labkit.system.bounds import check_numbers
from labkit.system.comma_list import listed
from labkit.system.errors import UserError
from labkit.system.output_folder import RUNS, check_output_folder
from labkit.system.partly import Show, so_far, unseen
from labkit.system.progress import Progress, part_of, unheard
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
PROMPT = 64  # tokens
WINDOW, WINDOWS = 256, 8  # most tokens of a window, and least number of windows of a short text
ERRORS, TURNS, ALL = 15, 55, 100  # percent of the work: after the errors, after the runs of all sides, at the end


def study_precision(
    *,
    model: Model = "smollm2-135m",
    precisions: Annotated[
        str, StudySetting("names as for `labkit evaluate --dtype`; the first is the baseline", check=parse_precisions)
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
    threads = threads or team_size()
    torch.set_num_threads(threads)
    follow = progress or unheard
    choices = [name for name in CHOICES if reason_against(source, name) is None]
    layers = dict.fromkeys(layers_of(name) for name in possible if name not in (EXACT, STORED))
    stored = matrix_errors(source, tuple(dict.fromkeys([*layers, *choices])), part_of(follow, 0, ERRORS, ALL))
    known: dict[str, Any] = {"refused": refused, "stored": stored, "spread": _spread(source, stored)}
    show(so_far(PrecisionStudy, **known))
    turns = take_turns(
        [SideSpec(f"fused:{name}", threads) for name in possible],
        comparison_case(model=model, dtype=EXACT, batch=1, prompt=PROMPT, new=new_tokens, threads=threads),
        Schedule(rounds=rounds or None, budget_s=None if rounds else BUDGET_S, stages=False, question=question),
        decided=first_is_decided,
        progress=part_of(follow, ERRORS, TURNS, ALL),
    )
    known |= {name: getattr(turns, name) for name in ("looks", "why_rounds", "tells_apart", "dropped_pairs")}
    timed = [_timed(source, turns, index, name) for index, name in enumerate(possible)]
    show(so_far(PrecisionStudy, sides=tuple(so_far(PrecisionSide, **fields) for fields in timed), **known))
    if turns.interrupted:  # a study without evaluations is no record, and they would take as long again
        raise KeyboardInterrupt
    sides = []
    for index, name in enumerate(possible):
        begin, end = (TURNS + (ALL - TURNS) * done / len(possible) for done in (index, index + 1))
        scores = evaluate(
            model, dtype=name, tokens=tokens, window=window_of(tokens), threads=threads,
            progress=part_of(follow, begin, end, ALL, f"{name}: "),
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


def _timed(source: ModelSource, turns: Turns, index: int, precision: str) -> dict[str, Any]:
    """The fields of a side that are known before its quality."""
    return {
        "precision": precision,
        "measurement": turns.sides[index],
        "head": None if precision in (EXACT, STORED) else head_error(source, precision),
        "first_difference": turns.comparison(0, index).first_difference,
    }


def _spread(source: ModelSource, stored: Sequence[StoredMatrices]) -> Spread:
    (rows,) = (matrices for matrices in stored if matrices.precision == WHOLE_ROWS)
    worst = max(rows.errors, key=lambda matrix: matrix.error)
    assert worst.layer is not None
    return spread_of(source, worst.layer, worst.matrix)
