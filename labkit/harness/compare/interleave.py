"""`take_turns`: sides, each in processes of its own, run the same case in the same rounds.

A shared machine drifts within seconds, so what is compared must run side by side: a round is one run of each side in
random order, and each run has the read bandwidth probed just before and just after it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

import numpy as np

from labkit.harness.compare.baselines import comparison_device
from labkit.harness.compare.conversion import converted
from labkit.harness.compare.participant import Participant, Ran
from labkit.harness.compare.plan import Prepared, Schedule, SideSpec, labels, prepare
from labkit.harness.compare.providers import provider_of
from labkit.harness.compare.sides import SideProcesses
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
    """What `take_turns` found: `sides` in their order, and the tokens [round, sequence, position] of each.

    `looks`: after how many rounds it was looked at, where rounds were added.
    """

    sides: tuple[Measurement, ...]
    tokens: tuple[list[Any], ...]
    looks: tuple[int, ...] = ()

    def comparison(self, baseline: int, candidate: int) -> Comparison:
        """Two of the sides, by their places."""
        difference = first_difference(self.tokens[baseline], self.tokens[candidate])
        return Comparison(
            baseline=self.sides[baseline],
            candidate=self.sides[candidate],
            tokens_equal=difference is None,
            first_difference=difference,
            looks=self.looks,
        )


def last_is_decided(found: Turns) -> bool:
    """Whether the last side has been told from, or found the same as, every other one."""
    others = range(len(found.sides) - 1)
    return all(found.comparison(which, -1).verdict is not Verdict.UNDECIDED for which in others)


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
    """Measure sides, which have threads and ranks of their own in place of the case's, in the same rounds.

    `show` is given the rounds once they are done, before stages and answers, which are not measured then.

    `decided` says of a schedule with a budget whether it needs no more rounds. `output` is a folder for the caller's
    records: it is checked, and made, before anything is measured.

    A case with `memory_gb` limits the memory of each side, all of its ranks together, from where its weights are
    loaded; files that a side reads are made cold before each of its runs.

    UserError: a name, size or dtype that cannot be, or a folder that cannot be written to. NotQuietError: the schedule
    waits for a quiet machine, which it did not become. WorkerError: a side's process failed; OutOfBudgetError, which is
    one: it does not fit into its memory.
    """
    prepared = prepare(sides, case, schedule)
    if output is not None:
        check_output_folder(output)
    if schedule.scratch is not None:
        check_output_folder(schedule.scratch, what="models")
    if schedule.wait_quiet_s is not None:
        needed = max(side.cores for side in sides) if comparison_device().type == "cpu" else 1
        wait_until_quiet(schedule.wait_quiet_s, needed=needed, progress=progress)
    conversions = sum(provider_of(side.name) is not None for side in sides)
    each = 1 + schedule.first_rounds + schedule.stages + bool(schedule.question)
    steps = _Steps(conversions + len(sides) * each, progress)
    with ExitStack() as stack:
        folders = _folders(sides, prepared, schedule, steps, stack)
        participants = [
            Participant(
                name,
                side,
                stack.enter_context(SideProcesses(side.name, side.threads, side.ranks)),
                prepared,
                schedule,
            )
            for name, side in zip(labels(sides), sides, strict=True)
        ]
        for participant in participants:
            steps.begin(f"loading and warming up {participant.name}")
            participant.load(folders.get(participant.spec.name))
        rounds = _Rounds(participants, schedule, decided, steps)
        for participant in participants:
            participant.note_peak()
        rounds.run()
        for participant in participants:
            participant.note_peak()
            participant.note_memory()
            participant.note_reading()
        if show:
            show(_timed(rounds.found()))
        for participant in participants if schedule.stages else ():
            steps.begin(f"stages of {participant.name}")
            participant.note_stages()
        for participant in participants if schedule.question else ():
            steps.begin(f"an answer of {participant.name}")
            participant.note_answer()
    steps.end()
    return rounds.found()


def first_difference(a: Sequence[Any], b: Sequence[Any]) -> int | None:
    """The earliest position at which two arrays of tokens [round, sequence, position] differ, or None."""
    one, other = np.asarray(a), np.asarray(b)
    if one.shape != other.shape:
        return min(one.shape[-1], other.shape[-1])
    positions = np.nonzero((one != other).any(axis=(0, 1)))[0]
    return int(positions[0]) if len(positions) else None


def _timed(found: Turns) -> Turns:
    """What the rounds alone have found."""
    kept = ({name: value for name, value in side if name not in UNTIMED} for side in found.sides)
    return replace(found, sides=tuple(so_far(Measurement, **fields) for fields in kept))


def _folders(
    sides: Sequence[SideSpec], prepared: Prepared, schedule: Schedule, steps: _Steps, stack: ExitStack
) -> dict[str, str]:
    """The folders of sides that have files of their own, by the name of the side, until the stack is closed."""
    found: dict[str, str] = {}
    for side in sides:
        if provider_of(side.name) is not None:
            steps.begin(f"preparing the weights for {side.name}")
            dtype, seed, scratch = prepared.case.dtype, schedule.seed, schedule.scratch
            made = converted(side.name, prepared.weights, dtype=dtype, seed=seed, scratch=scratch)
            found[side.name] = str(stack.enter_context(made))
    return found


class _Rounds:
    """The rounds of a schedule, as many as were asked for or as it takes."""

    def __init__(
        self, participants: list[Participant], schedule: Schedule, decided: Callable[[Turns], bool], steps: _Steps
    ) -> None:
        self._participants, self._schedule, self._decided, self._steps = participants, schedule, decided, steps
        self._looks: list[int] = []
        self._others = OthersByRound([pid for each in participants for pid in each.process.pids])

    def run(self) -> None:
        """Run them all, each participant noting its own."""
        device = comparison_device()

        def probe(which: int) -> float | None:
            return probe_bandwidth(self._participants[which].spec.cores, device)

        begun = [self._begun(participant) for participant in self._participants]
        for turn in turns(begun, self._indices(), probe=probe, seed=self._schedule.seed):
            self._participants[turn.side].note(turn)
        self._others.end()

    def found(self) -> Turns:
        """What all participants have noted so far."""
        measured = tuple(each.measurement(self._others.cores) for each in self._participants)
        return Turns(measured, tuple(each.tokens for each in self._participants), tuple(self._looks))

    def _begun(self, participant: Participant) -> Callable[[int], Ran]:
        """The run of a participant, announced."""

        def run(index: int) -> Ran:
            of = "" if self._schedule.budget_s else f" of {self._schedule.rounds}"
            self._steps.begin(f"round {index + 1}{of}: {participant.name}")
            return participant.run(index)

        return run

    def _indices(self) -> Iterator[int]:
        """The number of each round, until there are enough: as given, or decided, or the budget spent."""
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
                if spent or self._decided(self.found()):
                    return
                look = next_look(done)
                self._steps.expect((look - done) * len(self._participants))


class _Steps:
    """Counts the parts of a comparison for whoever follows."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._begun, self._total, self._progress = 0, total, progress

    def expect(self, more: int) -> None:
        self._total += more

    def begin(self, label: str) -> None:
        self._say(self._begun, label)
        self._begun += 1

    def end(self) -> None:
        self._say(max(self._begun, self._total), "done")

    def _say(self, done: int, label: str) -> None:
        if self._progress:
            self._progress(done, self._total, label)
