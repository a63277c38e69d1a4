"""What a notebook shows of a model that is larger than memory: what batch pays, what hides what, who is faster."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal

from pydantic import Field, ValidationError

from labkit.engine.offload.prepared import folder_for
from labkit.harness.compare.from_disk import ACCELERATE_DISK, HF_DISK, STREAMED
from labkit.harness.compare.interleave import take_turns
from labkit.harness.compare.plan import Schedule, SideSpec
from labkit.harness.compare.sides import WorkerError
from labkit.harness.compare.versus import comparison_case
from labkit.harness.comparison import Comparison
from labkit.harness.records import SCHEMA_VERSION, Case, FrozenRecord
from labkit.harness.results import OF_LARGER, SaveError, save_lines
from labkit.harness.streaming.make import plan_streaming
from labkit.harness.streaming.measured import measured_plan
from labkit.harness.streaming.plan import StreamingPlan
from labkit.harness.streaming.records import BatchPoint, MemorySample
from labkit.harness.streaming.spans import hidden_share
from labkit.harness.streaming.table import free_sentence, three_digits
from labkit.models.dtypes import FLOAT_DTYPES
from labkit.statistics import Trust
from labkit.studies.outcome import Outcome, Study
from labkit.system.asked_from import setting
from labkit.system.bounds import check_numbers
from labkit.system.errors import UserError
from labkit.system.home import expanded
from labkit.system.output_folder import RUNS, check_output_folder
from labkit.system.owned_folder import owned_folder
from labkit.system.partly import Show, so_far, unseen
from labkit.system.progress import Progress, unheard
from labkit.system.validation import first_problem

BASELINES = f"{ACCELERATE_DISK}, {HF_DISK}"
COMPARED_NEW = 3  # tokens that each side generates: a baseline may take seconds for each
REASON = 200  # letters of the reason why a side was left out
WARM_UP = 2  # new tokens of the run that is not timed
MEASURED, ALL = 60, 100  # of the work in percent: when all batches have run


class LeftOut(FrozenRecord):
    """A side that could not be measured, and why."""

    side: str
    reason: str


class StreamingStudy(Study, FrozenRecord):
    """What `study_larger_than_memory` found.

    plan: predicted, with the measured batches as its points. too_large: batches that were asked for and do not fit.
    memory: of the engine's process over time. comparisons: each baseline against the streamed engine, in the same
    memory, in rounds of their own. left_out: baselines that could not be measured.
    """

    kind: Literal["streaming_study"] = "streaming_study"
    schema_version: Literal[1] = SCHEMA_VERSION
    created: datetime = Field(default_factory=lambda: datetime.now(UTC))
    plan: StreamingPlan
    too_large: tuple[int, ...] = ()
    memory: tuple[MemorySample, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    left_out: tuple[LeftOut, ...] = ()

    @property
    def points(self) -> tuple[BatchPoint, ...]:
        return self.plan.points

    @property
    def shown(self) -> BatchPoint:
        """The batch whose timeline is shown: the one with the most tokens per second."""
        assert self.plan.best_point is not None
        return self.plan.best_point

    @property
    def hidden(self) -> float | None:
        """How much of the shorter of reading and computing ran under the other, in the steps that are shown."""
        return hidden_share(self.shown.spans)

    @property
    def free_sentence(self) -> str:
        """From how many sequences on streaming costs nothing, as predicted."""
        return free_sentence(self.plan)

    @property
    def times_larger(self) -> float:
        """The weights over the memory that there is for everything."""
        return self.plan.footprint.weights / self.plan.memory

    def case(self) -> dict[str, Any]:
        return self.plan.case.model_dump()

    def rows(self) -> list[dict[str, Any]]:
        """A row for each batch, and for each baseline at the batch that it was compared at."""
        plan = self.plan
        of_engine = [
            _row(
                "fused-streamed",
                point.batch,
                point.step_ms,
                point.tokens_per_s,
                point.trust(plan.case.threads, plan.environment.cores),
            )
            | {"resident_layers": point.resident_layers, "share_of_disk": point.share_of_disk}
            for point in self.points
        ]
        of_others = [
            _row(side.name, side.case.batch, side.per_token_ms, side.tokens_per_s, found.trust())
            | {"resident_layers": None, "share_of_disk": None}
            for found in self.comparisons
            for side in (found.baseline,)
        ]
        return of_engine + of_others

    @property
    def claim(self) -> str:
        """What batch pays, and how much of the disk that takes."""
        case, first, best = self.plan.case, self.points[0], self.shown
        hidden, share = self.hidden, best.share_of_disk
        streamed = "" if share is None else f"; its steps read at {share:.0%} of the disk's rate"
        overlap = "" if hidden is None else f" and hide {hidden:.0%} of the shorter of reading and computing"
        gains = f"batch {first.batch:,} gives {three_digits(first.tokens_per_s)} tokens/s"
        if best.batch != first.batch:
            gains += f" and batch {best.batch:,} gives {three_digits(best.tokens_per_s)}"
        larger = three_digits(self.times_larger)
        return f"{case.model}, {case.precision}, {larger} times its memory: {gains}{streamed}{overlap}"

    @property
    def headline(self) -> str:
        """The claim, and what weakens it."""
        return self.plan.trust.graded(self.claim)

    @property
    def outcome(self) -> Outcome:
        return Outcome.graded(self.claim, self.plan.trust, self.plan.environment.machine)


def _row(side: str, batch: int, step_ms: float, tokens_per_s: float, trust: Trust) -> dict[str, Any]:
    return {
        "side": side,
        "at_batch": batch,
        "step_ms": step_ms,
        "tokens_per_s": tokens_per_s,
        "trustworthy": trust.trustworthy,
    }


def study_larger_than_memory(
    model: str = "llama-shape",
    *,
    precision: str = "bfloat16",
    memory_gb: float = 0.5,
    batches: str = "1, 4, 16",
    prompt: int = 16,
    new: int = 8,
    baselines: str = BASELINES,
    rounds: int = 2,
    path: str | os.PathLike[str] = "",
    slots: int = 3,
    threads: int | None = None,
    output: str | os.PathLike[str] = RUNS,
    progress: Progress | None = None,
    show: Show = unseen,
) -> StreamingStudy:
    """Lets the engine generate with each batch in `memory_gb` GB, in a process of its own, with the rates of disk and
    processor probed beside each, and measures baselines against it in the same memory, at the first batch.

    batches: numbers, separated by commas; those that do not fit are left out, and named. baselines: sides of
    `labkit compare`, separated by commas, or none; one that cannot run is left out with the reason. path: a folder on
    the disk that layers are read from, where the packed weights stay; empty: a temporary one in labkit's folder for
    caches. The rest is as for `plan_streaming`. The record is written under `output`, a file for `load_study`.
    show: given the study of what is measured so far.

    UserError as from `plan_streaming`, where no batch fits, and for a path that is not there.
    """
    check_numbers(rounds=rounds)
    wanted, follow = parse_batches(batches), progress or unheard
    check_output_folder(output)
    with _folder(path) as folder:
        follow(0, ALL, "probing the disk and the processor")
        plan = plan_streaming(
            model, memory_gb=memory_gb, precision=precision, prompt=prompt, new=new, slots=slots, threads=threads,
            path=folder,
        )  # fmt: skip
        fitting = tuple(batch for batch in wanted if batch <= plan.largest_batch)
        if not fitting:
            raise UserError(
                f"got batches = {batches!r} in {memory_gb:g} GB, expected one of at most {plan.largest_batch:,}; allow "
                "more memory, or fewer tokens"
            )
        plan, memory = measured_plan(
            plan, batches=fitting, path=folder, rounds=rounds, progress=_part(follow, 2, MEASURED)
        )
        known = {"plan": plan, "too_large": tuple(batch for batch in wanted if batch not in fitting), "memory": memory}
        show(so_far(StreamingStudy, **known))
        comparisons, left_out = _compared(plan, fitting[0], parse_sides(baselines), rounds, folder, follow)
    found = StreamingStudy(**known, comparisons=comparisons, left_out=left_out)
    try:
        save_study(found, output)
    except SaveError as error:
        warnings.warn(str(error), stacklevel=2)
    follow(ALL, ALL, "done")
    return found


def parse_batches(text: str) -> tuple[int, ...]:
    """The numbers in "1, 4, 16", each once, from the smallest on. UserError for none, and for what is no number."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and int(part) >= 1 for part in parts):
        raise UserError(f"got batches = {text!r}, expected numbers of sequences, such as '1, 4, 16'")
    return tuple(sorted({int(part) for part in parts}))


def parse_sides(text: str) -> tuple[str, ...]:
    """The names in "accelerate-disk, hf-disk", each once."""
    return tuple(dict.fromkeys(name for part in text.split(",") if (name := part.strip())))


def save_study(study: StreamingStudy, folder: str | os.PathLike[str]) -> Path:
    """Writes it as a file of its own under `folder`, whole or not at all; returns its path. SaveError as for `save`."""
    model = Path(study.plan.case.model).name
    return save_lines(Path(folder) / f"{study.created:%Y%m%dT%H%M%S%f}-{model}{OF_LARGER}", [study])


def load_study(path: str | os.PathLike[str]) -> StreamingStudy:
    """What `save_study` wrote. UserError for a file that holds no such record."""
    try:
        return StreamingStudy.model_validate_json(Path(path).read_text(encoding="utf-8"))
    except ValidationError as error:
        raise UserError(
            f"{path} is no study of streaming of schema version {SCHEMA_VERSION}: {first_problem(error, 'the file')}; "
            "run the notebook again"
        ) from None


def _compared(
    plan: StreamingPlan, batch: int, baselines: Sequence[str], rounds: int, folder: Path, follow: Progress
) -> tuple[tuple[Comparison, ...], tuple[LeftOut, ...]]:
    """Each baseline beside the streamed engine, in rounds of their own: where one cannot run, the others still do.
    folder: on the disk that their models are read from.
    """
    found, left_out = list[Comparison](), list[LeftOut]()
    for index, name in enumerate(baselines):
        part = _part(follow, *(MEASURED + (ALL - MEASURED) * done / len(baselines) for done in (index, index + 1)))
        try:
            found.append(_against(plan, batch, name, rounds, folder, part))
        except (UserError, WorkerError) as error:
            reason = shorten(str(error).partition("\n")[0], REASON, placeholder=" …")
            left_out.append(LeftOut(side=name, reason=reason))
    return tuple(found), tuple(left_out)


def _against(plan: StreamingPlan, batch: int, name: str, rounds: int, folder: Path, follow: Progress) -> Comparison:
    case, threads = plan.case, plan.case.threads
    if case.precision not in FLOAT_DTYPES:
        raise UserError(f"baselines compute in {', '.join(FLOAT_DTYPES)}, and the weights here are {case.precision}")
    sides = [SideSpec(name, threads), SideSpec(STREAMED, threads)]
    schedule = Schedule(rounds=rounds, warm_up=WARM_UP, stages=False, scratch=folder)
    return take_turns(sides, compared_case(plan, batch), schedule, progress=follow).comparison(0, 1)


def compared_case(plan: StreamingPlan, batch: int) -> Case:
    """What each side of a comparison generates, in the memory of the plan."""
    case = plan.case
    return comparison_case(
        model=case.model, dtype=case.precision, batch=batch, prompt=case.prompt_tokens, new=COMPARED_NEW,
        threads=case.threads, memory_gb=case.memory_gb,
    )  # fmt: skip


@contextmanager
def _folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    if os.fspath(path):
        given = expanded(path)
        if not given.is_dir():
            raise UserError(
                f"got path = {os.fspath(path)!r}, which is no folder; expected one on the disk that layers are to be "
                "read from, or nothing for a temporary one"
            )
        yield given
        return
    parent = check_output_folder(folder_for(None), what="streamed weights", option=setting("path"))
    with owned_folder("study-", parent) as folder:
        yield folder


def _part(follow: Progress, begin: float, end: float) -> Progress:
    """Who follows a part of the work that goes from `begin` to `end` percent."""
    return lambda done, total, label: follow(begin + (end - begin) * done / max(total, 1), ALL, label)
