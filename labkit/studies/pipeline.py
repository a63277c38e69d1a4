"""The study of a pipeline: the bubble of each schedule, and the effect of micro-batches and of tensor parallelism."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from labkit.harness.pipeline.formulas import SCHEDULES, StepLaw
from labkit.harness.pipeline.measure import NAIVE, TENSOR_PARALLEL, measure_pipeline, settings_of
from labkit.harness.pipeline.records import PipelineMeasurement, ScheduleRun, StageSpan
from labkit.harness.pipeline.simulate import simulate, simulated_bubble
from labkit.harness.results import load_records, save_lines, save_or_warn
from labkit.statistics import Ratio, Trust, grade, ratio, taken_cores
from labkit.statistics.ratios import median_ratio
from labkit.statistics.trust import Doubt
from labkit.studies.frames import number
from labkit.studies.outcome import Notes, Outcome, Study
from labkit.studies.settings import Batch, FloatDtype, Model, NewTokens, PromptTokens, RankThreads, Rounds, StudySetting
from labkit.system.comma_list import listed, listed_counts
from labkit.system.errors import UserError
from labkit.system.home import expanded
from labkit.system.output_folder import RUNS, check_output_folder
from labkit.system.partly import Show, unseen
from labkit.system.progress import Progress

ALL_SCHEDULES = ", ".join(SCHEDULES)
FEW_ROWS = 8  # rows of a batch between one row per stage and all rows
CORES = "give each rank cores of its own: fewer stages, or fewer threads"
CLEARLY = 1.05  # reading weights is the limit if it takes at least this many times as long as computing the rows


@dataclass(frozen=True, repr=False)
class PipelineStudy(Study):
    """Result of `study_pipeline`: a measurement, and figures derived from it."""

    measured: PipelineMeasurement

    @property
    def shown(self) -> tuple[ScheduleRun, ...]:
        """One run of each schedule, with the number of micro-batches closest to the number of stages. The schedule that
        is slowest by its formula comes first.
        """
        stages, runs = self.measured.case.stages, dict[str, ScheduleRun]()
        for run in sorted(self.measured.runs, key=lambda run: abs(run.micro_batches - stages)):
            runs.setdefault(run.schedule, run)
        return tuple(runs[name] for name in reversed(SCHEDULES) if name in runs)

    def ideal(self, run: ScheduleRun, tokens: int | None = None) -> tuple[StageSpan, ...]:
        """The simulated run with the measured times of its stages, over `tokens` tokens or all."""
        return simulate(run.schedule, run.step_ms, tokens or run.tokens, run.micro_batches)

    def unequal(self, run: ScheduleRun) -> float:
        """The bubble that remains in the ideal run because the stages are not equal."""
        return simulated_bubble(self.ideal(run))

    @cached_property
    def law(self) -> StepLaw | None:
        """t(r) fitted to the steps that were measured while all stages worked; None if only naive was measured."""
        runs = [run for run in self.measured.runs if run.schedule != NAIVE]
        if not runs:
            return None
        fitted = "queue" if any(run.schedule == "queue" for run in runs) else runs[0].schedule
        times = {run.batch / run.micro_batches: sum(run.step_ms) / run.stages for run in runs if run.schedule == fitted}
        return StepLaw.through(times)

    @property
    def most_parts(self) -> float | None:
        """The number of micro-batches from which on reading weights is the limit. None: it was not the limit even
        for the smallest micro-batch, or only naive was measured.
        """
        law = self.law
        if law is None:
            return None
        fewest_rows = min(run.batch / run.micro_batches for run in self.measured.runs)
        if fewest_rows * law.ms_per_row * CLEARLY > law.weights_ms:
            return None
        return self.measured.case.batch / law.turning_rows

    @property
    def farthest(self) -> ScheduleRun:
        """The run whose bubble differs most from its formula."""
        return max(self.measured.runs, key=lambda run: abs(run.points_over))

    @property
    def gains(self) -> dict[str, float]:
        """Tokens per second of each run / tokens per second of naive, or of the first run if naive was left out."""
        runs = self.measured.runs
        base = next((run for run in runs if run.schedule == NAIVE), runs[0])
        return {run.name: run.tokens_per_s / base.tokens_per_s for run in runs}

    def against_tensor_parallel(self) -> dict[int, float]:
        """Tokens per second of the queue / tokens per second of tensor parallelism, by batch."""
        rates = {(point.way, point.batch): point.tokens_per_s for point in self.measured.ways}
        return {
            batch: rates["queue", batch] / rate
            for (way, batch), rate in rates.items()
            if way == TENSOR_PARALLEL and ("queue", batch) in rates
        }

    @property
    def notes(self) -> Notes:
        """The result on the points that the notebook asks a reader to notice."""
        sentences = [
            f"{run.name}: bubble {run.bubble:.1%}, by formula {run.formula:.1%}, and {self.unequal(run):.1%} with the "
            f"times that its stages took ({', '.join(number(ms) for ms in run.step_ms)} ms); "
            f"{number(run.tokens_per_s)} tokens/s."
            for run in self.shown
        ]
        slowest, last = self.shown[0], self.shown[-1]
        if slowest.schedule == NAIVE and last is not slowest:
            alone, together = sum(slowest.step_ms), sum(last.step_ms) * last.micro_batches
            sentences.append(
                f"All rows take {number(alone)} ms of work in naive, where one stage works at a time. In {last.name}, "
                f"stages share the memory and read their weights {last.micro_batches} times, and the work takes "
                f"{number(together)} ms: this is not a bubble, but it reduces the schedule's gain."
            )
        for batch, times in sorted(self.against_tensor_parallel().items()):
            winner = "the pipeline" if times > 1 else "tensor parallelism"
            sentences.append(
                f"At batch {batch} the queue makes {times:.2f} times the tokens of tensor parallelism: {winner} wins."
            )
        if self.measured.left_out:
            sentences.append(f"Not measured: {self.measured.left_out}.")
        if self.measured.case.batch == 1:
            sentences.append("A batch of one keeps one stage at work, whatever the schedule.")
        return Notes(tuple(sentences), tuple(doubt.why for doubt in self.trust.doubts))

    def case(self) -> dict[str, Any]:
        return self.measured.case.model_dump(exclude={"batch"})

    def rows(self) -> list[dict[str, Any]]:
        """A row for each schedule and number of micro-batches, and for each way at each batch."""
        runs = [
            {
                "way": run.schedule,
                "micro_batches": run.micro_batches,
                "batch": run.batch,
                "tokens_per_s": run.tokens_per_s,
                "bubble": run.bubble,
                "formula": run.formula,
            }
            for run in self.measured.runs
        ]
        ways = [
            {
                "way": f"{point.way}, at other batches" if point.way != TENSOR_PARALLEL else point.way,
                "micro_batches": None,
                "batch": point.batch,
                "tokens_per_s": point.tokens_per_s,
                "bubble": None,
                "formula": None,
            }
            for point in self.measured.ways
        ]
        return runs + ways

    @property
    def best(self) -> ScheduleRun:
        """The run with the most tokens per second."""
        return max(self.measured.runs, key=lambda run: run.tokens_per_s)

    def gain(self, run: ScheduleRun) -> Ratio | None:
        """Tokens per second of a run / tokens per second of naive, with the interval over rounds. None: naive was not
        measured, the run is naive's own, or the record has the rates of fewer than two rounds.
        """
        names = [measured_run.name for measured_run in self.measured.runs]
        if NAIVE not in names or run.name == NAIVE or not self.measured.rates or len(self.measured.rates[0]) < 2:
            return None
        base, rates = (self.measured.rates[names.index(name)] for name in (NAIVE, run.name))
        return ratio([1 / rate for rate in base], [1 / rate for rate in rates])

    @property
    def trust(self) -> Trust:
        """The grade of the best schedule's gain."""
        measured, best = self.measured, self.best
        case, environment = measured.case, measured.environment
        needed, others = case.stages * case.threads, measured.others_cores
        taken = () if others is None else (taken_cores(others, needed=needed, cores=environment.cores),)
        own = median_ratio([1 / rate for rate in measured.rates[measured.runs.index(best)]] if measured.rates else ())
        trust = grade(self.gain(best) or own, len(measured.bubbles[0]), taken_cores=taken)
        if measured.pinned:
            return trust
        why = f"{case.stages} ranks had no cores of their own, so they waited for cores too"
        return Trust((*trust.doubts, Doubt(why, (CORES,))))

    @property
    def claim(self) -> str:
        """The gain of the best schedule, with its interval, and the bubble that differs most from its formula."""
        best, far = self.best, self.farthest
        gained = f"{best.name} makes the most tokens"
        if (gain := self.gain(best)) is not None:
            gained = f"{best.name} makes {gain} naive's tokens"
        elif NAIVE in self.gains and best.name != NAIVE:
            gained = f"{best.name} makes {self.gains[best.name]:.2f} times naive's tokens"
        return (
            f"{self.measured.case.title}: {gained}; the bubble that differs most from its formula is {far.name}'s, "
            f"{far.bubble:.0%} instead of {far.formula:.0%}"
        )

    @property
    def headline(self) -> str:
        """The claim, and its grade."""
        return self.trust.graded(self.claim)

    @property
    def outcome(self) -> Outcome:
        return Outcome.graded(self.claim, self.trust, self.measured.environment.machine)


def study_pipeline(
    *,
    model: Model = "smollm2-shape",
    dtype: FloatDtype = "float32",
    stages: Annotated[int, StudySetting("ranks that each have some of the layers", (2, 64))] = 2,
    batch: Batch = 32,
    prompt_tokens: PromptTokens = 8,
    new_tokens: NewTokens = 10,
    schedules: Annotated[
        str, StudySetting(f"some of {ALL_SCHEDULES}, separated by commas", check=parse_schedules)
    ] = ALL_SCHEDULES,
    micro_batches: Annotated[
        str, StudySetting("numbers of micro-batches of all schedules but naive, separated by commas", check=parse_parts)
    ] = "2, 4, 8",
    rounds: Rounds = 3,
    threads: RankThreads = 0,
    output: str | os.PathLike[str] = RUNS,
    progress: Progress | None = None,
    show: Show = unseen,
) -> PipelineStudy:
    """Generates with each schedule, one rank per stage, and compares the queue with tensor parallelism on the same
    number of ranks.

    - output: folder for the record, which `load_study` reads.
    - progress: receives the progress.
    - show: receives the study with the parts that are measured so far.

    UserError as for `measure_pipeline`, and for a text that is not a list.
    """
    names, parts = parse_schedules(schedules), parse_parts(micro_batches)
    settings_of(names, parts, batch, stages)
    check_output_folder(output)
    batches = sorted({min(rows, batch) for rows in (stages, FEW_ROWS, batch)})
    measured = measure_pipeline(
        model, dtype=dtype, stages=stages, batch=batch, prompt=prompt_tokens, new=new_tokens, schedules=names,
        micro_batches=parts, beside=batches, rounds=rounds, threads=threads or None, progress=progress,
        show=lambda measured: show(PipelineStudy(measured)),
    )  # fmt: skip
    study = PipelineStudy(measured)
    save_or_warn(study, output, save_study)
    return study


def parse_schedules(text: str) -> tuple[str, ...]:
    """The names in "queue, naive", each once. UserError for an empty list, and for unknown names."""
    names = listed(text)
    if not names or not set(names) <= set(SCHEDULES):
        raise UserError(f"got schedules = {text!r}, expected some of {ALL_SCHEDULES}")
    return names


def parse_parts(text: str) -> tuple[int, ...]:
    """The numbers in "2, 4", each once, in increasing order. UserError for an empty list, and for other text."""
    return listed_counts("micro_batches", text, "numbers of micro-batches, such as '2, 4'")


def save_study(study: PipelineStudy, folder: str | os.PathLike[str]) -> Path:
    """Writes the record to a new file under `folder`, whole or not at all, and returns its path.

    SaveError as for `save`.
    """
    measured = study.measured
    stem = f"{measured.created:%Y%m%dT%H%M%S%f}-{Path(measured.case.model).name}-pp{measured.case.stages}"
    return save_lines(expanded(folder) / f"{stem}.jsonl", [measured])


def load_study(path: str | os.PathLike[str]) -> PipelineStudy:
    """The study in a file from `save_study`. UserError if the file holds no such record."""
    measurements = [record for record in load_records(path) if isinstance(record, PipelineMeasurement)]
    if not measurements:
        raise UserError(f"{path} holds no measured pipeline; run the notebook again")
    return PipelineStudy(measurements[-1])
