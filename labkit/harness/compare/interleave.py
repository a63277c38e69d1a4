"""`take_turns` runs the same case on several sides in the same rounds, each side in processes of its own.

A shared machine drifts within seconds, so sides must run close together in time. A round is one run of each side, in
random order. The read bandwidth is probed just before and just after each run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

import numpy as np

from labkit.harness.compare.conversion import converted
from labkit.harness.compare.loaded_side import comparison_device
from labkit.harness.compare.loader import FolderLoader, loader_of
from labkit.harness.compare.measured_side import MeasuredSide, Ran
from labkit.harness.compare.plan import Prepared, Schedule, SideSpec, labels, prepare
from labkit.harness.compare.side_process import SideProcesses
from labkit.harness.comparison import Comparison
from labkit.harness.quiet import OthersByRound, wait_until_quiet
from labkit.harness.records import Case, Measurement
from labkit.harness.roofline import probe_bandwidth
from labkit.harness.rounds import turns
from labkit.statistics import Verdict
from labkit.statistics.sequential import next_look
from labkit.system.output_folder import check_output_folder
from labkit.system.partly import so_far
from labkit.system.progress import Progress

UNTIMED = frozenset({"stages", "stage_run", "rank_stages", "answer"})  # fields that are measured after the rounds


@dataclass(frozen=True)
class Turns:
    """Result of `take_turns`."""

    sides: tuple[Measurement, ...]  # in the order of the arguments
    tokens: tuple[list[Any], ...]  # [round, sequence, position] of each side
    looks: tuple[int, ...] = ()  # rounds after which the verdict was checked; empty: the number of rounds was fixed

    def comparison(self, baseline: int, candidate: int) -> Comparison:
        """Comparison of two of the sides, by their indices."""
        difference = first_difference(self.tokens[baseline], self.tokens[candidate])
        return Comparison(
            baseline=self.sides[baseline],
            candidate=self.sides[candidate],
            tokens_equal=difference is None,
            first_difference=difference,
            looks=self.looks,
        )


def last_is_decided(turns: Turns) -> bool:
    """Whether there is a verdict on the last side against every other side."""
    baselines = range(len(turns.sides) - 1)
    return all(turns.comparison(index, -1).verdict is not Verdict.UNDECIDED for index in baselines)


def take_turns(
    sides: Sequence[SideSpec],
    case: Case,
    schedule: Schedule,
    *,
    decided: Callable[[Turns], bool] = last_is_decided,
    output: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    show: Callable[[Turns], None] | None = None,
) -> Turns:
    """Measures sides in the same rounds. Each side has its own threads and ranks, instead of the case's.

    decided: whether the rounds so far are enough, for a schedule with a budget.
    output: a folder for the caller's records, checked and made before anything is measured.
    show: gets the rounds when they are done, before stages and answers are measured.

    A case with `memory_gb` limits the memory of each side, all of its ranks together, from loading on. Files that a
    side reads are made cold before each of its runs.

    UserError: an impossible name, size or dtype, or an unwritable folder. NotQuietError: the schedule waits for a quiet
    machine, and it did not become quiet. WorkerError: a side's process failed. OutOfBudgetError, a WorkerError: a side
    does not fit into its memory.
    """
    prepared = prepare(sides, case, schedule)
    if output is not None:
        check_output_folder(output)
    if schedule.scratch is not None:
        check_output_folder(schedule.scratch, what="models")
    if schedule.wait_quiet_s is not None:
        needed = max(side.cores for side in sides) if comparison_device().type == "cpu" else 1
        wait_until_quiet(schedule.wait_quiet_s, needed=needed, progress=progress)
    conversions = sum(isinstance(loader_of(side.name), FolderLoader) for side in sides)
    steps_per_side = 1 + schedule.first_rounds + schedule.stages + bool(schedule.question)
    steps = _Steps(conversions + len(sides) * steps_per_side, progress)
    with ExitStack() as stack:
        folders = _folders(sides, prepared, schedule, steps, stack)
        measured_sides = [
            MeasuredSide(
                name,
                side,
                stack.enter_context(SideProcesses(side.name, side.threads, side.ranks)),
                prepared,
                schedule,
            )
            for name, side in zip(labels(sides), sides, strict=True)
        ]
        for measured in measured_sides:
            steps.begin(f"loading and warming up {measured.name}")
            measured.load(folders.get(measured.spec.name))
        rounds = _Rounds(measured_sides, schedule, decided, steps)
        for measured in measured_sides:
            measured.note_peak()
        rounds.run()
        for measured in measured_sides:
            measured.note_peak()
            measured.note_memory()
            measured.note_reading()
        if show:
            show(_timed(rounds.result()))
        for measured in measured_sides if schedule.stages else ():
            steps.begin(f"stages of {measured.name}")
            measured.note_stages()
        for measured in measured_sides if schedule.question else ():
            steps.begin(f"an answer of {measured.name}")
            measured.note_answer()
    steps.end()
    return rounds.result()


def first_difference(a: Sequence[Any], b: Sequence[Any]) -> int | None:
    """The earliest position at which two arrays of tokens [round, sequence, position] differ, or None."""
    tokens_a, tokens_b = np.asarray(a), np.asarray(b)
    if tokens_a.shape != tokens_b.shape:
        return min(tokens_a.shape[-1], tokens_b.shape[-1])
    positions = np.nonzero((tokens_a != tokens_b).any(axis=(0, 1)))[0]
    return int(positions[0]) if len(positions) else None


def _timed(turns: Turns) -> Turns:
    """The measurements of the rounds alone, without stages and answers."""
    kept = ({name: value for name, value in side if name not in UNTIMED} for side in turns.sides)
    return replace(turns, sides=tuple(so_far(Measurement, **fields) for fields in kept))


def _folders(
    sides: Sequence[SideSpec], prepared: Prepared, schedule: Schedule, steps: _Steps, stack: ExitStack
) -> dict[str, str]:
    """Folders with the files of sides that read their own, by side; they stay until the stack is closed."""
    folders: dict[str, str] = {}
    for side in sides:
        if isinstance(loader_of(side.name), FolderLoader):
            steps.begin(f"preparing the weights for {side.name}")
            dtype, seed, scratch = prepared.case.dtype, schedule.seed, schedule.scratch
            folder = converted(side.name, prepared.weights, dtype=dtype, seed=seed, scratch=scratch)
            folders[side.name] = str(stack.enter_context(folder))
    return folders


class _Rounds:
    """The rounds of a schedule: a fixed number, or as many as the verdict takes."""

    def __init__(
        self, measured_sides: list[MeasuredSide], schedule: Schedule, decided: Callable[[Turns], bool], steps: _Steps
    ) -> None:
        self._measured_sides, self._schedule, self._decided, self._steps = measured_sides, schedule, decided, steps
        self._looks: list[int] = []
        self._others = OthersByRound([pid for measured in measured_sides for pid in measured.process.pids])

    def run(self) -> None:
        """Runs all rounds. Each side notes its own turns."""
        device = comparison_device()

        def probe(index: int) -> float | None:
            return probe_bandwidth(self._measured_sides[index].spec.cores, device)

        runs = [self._announced(side) for side in self._measured_sides]
        for turn in turns(runs, self._indices(), probe=probe, seed=self._schedule.seed):
            self._measured_sides[turn.side].note(turn)
        self._others.end()

    def result(self) -> Turns:
        """The measurements and tokens of all sides so far."""
        sides = self._measured_sides
        measurements = tuple(side.measurement(self._others.cores) for side in sides)
        return Turns(measurements, tuple(side.tokens for side in sides), tuple(self._looks))

    def _announced(self, side: MeasuredSide) -> Callable[[int], Ran]:
        """A function that announces a run of a side and makes it."""

        def run(index: int) -> Ran:
            total = "" if self._schedule.budget_s else f" of {self._schedule.rounds}"
            self._steps.begin(f"round {index + 1}{total}: {side.name}")
            return side.run(index)

        return run

    def _indices(self) -> Iterator[int]:
        """The number of each round, until the schedule is done, the verdict is clear or the budget is spent."""
        start, done, look = monotonic(), 0, self._schedule.first_rounds
        while True:
            yield done
            done += 1
            self._others.end_round()
            budget_s = self._schedule.budget_s
            if budget_s is None:
                if done == self._schedule.rounds:
                    return
                continue
            spent = done >= self._schedule.first_rounds and monotonic() - start >= budget_s
            if done == look or spent:
                self._looks.append(done)
                if spent or self._decided(self.result()):
                    return
                look = next_look(done)
                self._steps.expect((look - done) * len(self._measured_sides))


class _Steps:
    """Counts the steps of a comparison for its progress display."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._begun, self._total, self._progress = 0, total, progress

    def expect(self, more: int) -> None:
        self._total += more

    def begin(self, label: str) -> None:
        self._report(self._begun, label)
        self._begun += 1

    def end(self) -> None:
        self._report(max(self._begun, self._total), "done")

    def _report(self, done: int, label: str) -> None:
        if self._progress:
            self._progress(done, self._total, label)
