"""What a notebook shows of a pipeline: the bubble of each schedule, and what micro-batches and other ways give."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from labkit.harness.pipeline.formulas import SCHEDULES, StepLaw
from labkit.harness.pipeline.measure import NAIVE, TENSOR_PARALLEL, measure_pipeline, settings_of
from labkit.harness.pipeline.records import PipelineMeasurement, ScheduleRun, StageSpan
from labkit.harness.pipeline.simulate import simulate, simulated_bubble
from labkit.harness.results import SaveError, load_records, save_lines
from labkit.statistics import taken_cores
from labkit.statistics.trust import MOST_TAKEN
from labkit.studies.outcome import Outcome
from labkit.system.errors import UserError
from labkit.system.output_folder import RUNS, check_output_folder
from labkit.system.progress import Progress

ALL_SCHEDULES = ", ".join(SCHEDULES)
FEW_ROWS = 8  # of a batch between one row for each stage and all rows
FEWEST_ROUNDS = 3
GROWS = 1.05  # times the least time of a row, from which on reading weights is the limit


@dataclass(frozen=True)
class PipelineStudy:
    """A measurement, and what follows from it."""

    measured: PipelineMeasurement

    @property
    def shown(self) -> tuple[ScheduleRun, ...]:
        """A run of each schedule, the one whose number of micro-batches is closest to that of the stages; from the
        least tokens per second by the formula on.
        """
        stages, found = self.measured.case.stages, dict[str, ScheduleRun]()
        for run in sorted(self.measured.runs, key=lambda run: abs(run.micro_batches - stages)):
            found.setdefault(run.schedule, run)
        return tuple(found[name] for name in reversed(SCHEDULES) if name in found)

    def ideal(self, run: ScheduleRun, tokens: int | None = None) -> tuple[StageSpan, ...]:
        """The simulated run with the measured times of its stages, of all tokens or so many."""
        return simulate(run.schedule, run.step_ms, tokens or run.tokens, run.micro_batches)

    def unequal(self, run: ScheduleRun) -> float:
        """The bubble that is left in the ideal run, because stages are not equal."""
        return simulated_bubble(self.ideal(run))

    @cached_property
    def law(self) -> StepLaw | None:
        """t(r) through the steps that were measured while all stages worked; None where only naive was measured."""
        runs = [run for run in self.measured.runs if run.schedule != NAIVE]
        first = next((run.schedule for run in runs if run.schedule == "queue"), runs[0].schedule if runs else "")
        times = {run.batch / run.micro_batches: sum(run.step_ms) / run.stages for run in runs if run.schedule == first}
        return StepLaw.through(times) if times else None

    @property
    def most_parts(self) -> float | None:
        """The number of micro-batches from which on reading weights is the limit; None where no step showed that."""
        law, batch = self.law, self.measured.case.batch
        if law is None or self._fewest_rows * law.ms_per_row * GROWS > law.weights_ms:
            return None
        return batch / law.turning_rows

    @property
    def _fewest_rows(self) -> float:
        return min(run.batch / run.micro_batches for run in self.measured.runs)

    @property
    def farthest(self) -> ScheduleRun:
        """The run whose bubble differs most from its formula."""
        return max(self.measured.runs, key=lambda run: abs(run.points_over))

    @property
    def gains(self) -> dict[str, float]:
        """Tokens per second of each run over those of naive, or of the first run where naive was left out."""
        runs = self.measured.runs
        base = next((run for run in runs if run.schedule == NAIVE), runs[0])
        return {run.name: run.tokens_per_s / base.tokens_per_s for run in runs}

    def against_tensor_parallel(self) -> dict[int, float]:
        """Tokens per second of the queue over those of tensor parallelism, by batch."""
        rates = {(point.way, point.batch): point.tokens_per_s for point in self.measured.ways}
        return {
            batch: rates["queue", batch] / rate
            for (way, batch), rate in rates.items()
            if way == TENSOR_PARALLEL and ("queue", batch) in rates
        }

    @property
    def doubts(self) -> list[str]:
        """What weakens these figures."""
        measured, found = self.measured, []
        case, environment = measured.case, measured.environment
        if (rounds := len(measured.bubbles[0])) < FEWEST_ROUNDS:
            found.append(f"{rounds} rounds, fewer than {FEWEST_ROUNDS}")
        if not measured.pinned:
            found.append(f"{case.stages} ranks had no cores of their own, so they waited for cores too")
        needed = case.stages * case.threads
        if measured.others_cores is not None:
            taken = taken_cores(measured.others_cores, needed=needed, cores=environment.cores)
            if taken > MOST_TAKEN:
                found.append(f"other programs used {taken:.1f} of the processors that it was measured on")
        return found

    @property
    def claim(self) -> str:
        """What the best schedule gains, and how far bubbles are from their formulas."""
        best, gain = max(self.gains.items(), key=lambda each: each[1])
        gained = (
            f"{best} makes {gain:.2f} times naive's tokens" if NAIVE in self.gains else f"{best} makes the most tokens"
        )
        far = self.farthest
        return (
            f"{self.measured.case.title}: {gained}; bubbles are within {abs(far.points_over):.1f} points of the formula"
        )

    @property
    def headline(self) -> str:
        """The claim, and what weakens it."""
        return "; ".join([self.claim, *self.doubts])

    @property
    def outcome(self) -> Outcome:
        doubts = self.doubts
        grade = "; ".join(doubts) or "trustworthy: ranks with cores of their own, on a quiet machine"
        return Outcome(self.claim, grade, not doubts, self.measured.environment.machine)


def study_pipeline(
    model: str = "llama-shape",
    *,
    dtype: str = "float32",
    stages: int = 2,
    batch: int = 32,
    prompt: int = 16,
    new: int = 16,
    schedules: str = ALL_SCHEDULES,
    micro_batches: str = "2, 4, 8",
    rounds: int = 3,
    threads: int | None = None,
    output: str | os.PathLike[str] = RUNS,
    progress: Progress | None = None,
) -> PipelineStudy:
    """Generates with each schedule, a rank for each stage, and holds the queue against tensor parallelism on as many.

    schedules, micro_batches: names and numbers, separated by commas. threads: of each rank; None: its share of the
    processors. The record is written under `output`, a file for `load_study`. UserError as for `measure_pipeline`, and
    for what is no list.
    """
    names, parts = parse_schedules(schedules), parse_parts(micro_batches)
    settings_of(names, parts, batch, stages)
    check_output_folder(output)
    beside = sorted({min(each, batch) for each in (stages, FEW_ROWS, batch)})
    measured = measure_pipeline(
        model, dtype=dtype, stages=stages, batch=batch, prompt=prompt, new=new, schedules=names, micro_batches=parts,
        beside=beside, rounds=rounds, threads=threads, progress=progress,
    )  # fmt: skip
    try:
        save_study(PipelineStudy(measured), output)
    except SaveError as error:
        warnings.warn(str(error), stacklevel=2)
    return PipelineStudy(measured)


def parse_schedules(text: str) -> tuple[str, ...]:
    """The names in "queue, naive", each once. UserError for none, and for unknown ones."""
    names = tuple(dict.fromkeys(name for part in text.split(",") if (name := part.strip())))
    if not names or not set(names) <= set(SCHEDULES):
        raise UserError(f"got schedules = {text!r}, expected some of {ALL_SCHEDULES}")
    return names


def parse_parts(text: str) -> tuple[int, ...]:
    """The numbers in "2, 4", each once, from the smallest on. UserError for none, and for what is no number."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and int(part) >= 1 for part in parts):
        raise UserError(f"got micro_batches = {text!r}, expected numbers of micro-batches, such as '2, 4'")
    return tuple(sorted({int(part) for part in parts}))


def save_study(study: PipelineStudy, folder: str | os.PathLike[str]) -> Path:
    """Writes its record as a file of its own under `folder`, whole or not at all; returns its path.

    SaveError as for `save`.
    """
    measured = study.measured
    stem = f"{measured.created:%Y%m%dT%H%M%S%f}-{Path(measured.case.model).name}-pp{measured.case.stages}"
    return save_lines(Path(folder) / f"{stem}.jsonl", [measured])


def load_study(path: str | os.PathLike[str]) -> PipelineStudy:
    """What `save_study` wrote. UserError for a file that holds no such record."""
    found = [record for record in load_records(path) if isinstance(record, PipelineMeasurement)]
    if not found:
        raise UserError(f"{path} holds no pipeline that was measured; run the notebook again")
    return PipelineStudy(found[-1])
