"""Whether a submission computes the right result, and how fast.

Everything that a submission could forge stays here: inputs, expected results, clock, verdict. It runs in a process of
its own, confined, which sees only the arguments of its calls. They are written while that process stands still, so it
cannot work ahead, and it stands still again before its results are read, so it cannot work on. Every result of a timed
round is checked.

The judge cannot protect itself against the owner of the machine, who may change this file. A grade is what another
machine finds, with seeds of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.harness.judge.arrays import JudgedCall, SharedArrays
from labkit.harness.judge.judged_process import JudgedProcess, Round, Submission, SubmissionError, judged
from labkit.statistics import Ratio
from labkit.statistics.sequential import EPOCHS, planned_ratio
from labkit.system.errors import RunError

HONEST_TIMES = 16  # error that is allowed / largest error of the honest implementation, relative to a result's scale
LEAST_ERROR = 1e-7  # that is allowed, relative to a result's scale
ALIKE = 1e-3  # difference to the result of a mistake, relative to its scale
TURNS = 9
POSSIBLE = 1.15  # most share of the limit; the reader may miss the rest
EXTRA_PROCESSOR_S, EXTRA_PROCESSOR = 0.02, 1.3  # processor time beyond the round's own, and its share
Expected = Sequence[NDArray[np.float64]]
Here = Callable[[SharedArrays], float]  # makes the calls of a round in this process; returns its seconds


@dataclass(frozen=True)
class Question:
    """One call, and what is right for it.

    expected: its checked results, in float64.
    mistakes: what comes out of a common mistake, by a sentence about it.
    about: the call in a few words, for a remark about it.
    plain: the results of a plain implementation, whose errors are the measure; None: the task's honest submission is
    asked.
    """

    call: JudgedCall
    expected: Expected
    mistakes: Mapping[str, Expected] = field(default_factory=dict)
    about: str = ""
    plain: Sequence[NDArray[Any]] | None = None


@dataclass(frozen=True)
class Task:
    """What a submission has to compute.

    draw: the questions of a round, with new values.
    honest: a plain implementation. Its errors and its speed are the measure.
    reader: what only reads the data that a submission has to read: the limit of its speed; None: unknown.
    """

    draw: Callable[[np.random.Generator], Sequence[Question]]
    honest: Submission | Here
    reader: Submission | Here | None = None


@dataclass(frozen=True)
class Finding:
    """What the judge found."""

    problem: str = ""  # empty: every result is right
    in_force: tuple[str, ...] = ()  # measures that confined the submission

    @property
    def right(self) -> bool:
        return not self.problem


@dataclass(frozen=True)
class Speed:
    """Speed of a right submission."""

    round_s: float  # typical time of a round
    ratio: Ratio  # honest implementation / submission
    share: Ratio | None  # of the limit: time of the reader / time of the submission; None: unknown
    gb_s: float  # at which it reads its inputs


def check(submission: Submission, task: Task, rng: np.random.Generator) -> Finding:
    """Whether a submission is right on newly drawn calls."""
    with closing(_Trial(task, rng)) as trial:
        try:
            with judged(submission, trial.arrays) as process:
                trial.arrays.fill()
                process.one_round()
                return Finding(trial.problem(), process.in_force)
        except SubmissionError as error:
            return Finding(str(error))


def answers(submission: Submission, calls: Sequence[JudgedCall]) -> list[list[NDArray[Any]]]:
    """The checked results of some calls, for tasks that have more than one right answer. SubmissionError: it failed, or
    wrote outside of its results.
    """
    with closing(SharedArrays(calls)) as arrays, judged(submission, arrays) as process:
        arrays.fill()
        process.one_round()
        if outside := arrays.written_outside():
            raise SubmissionError(f"it wrote outside of {outside}")
        return arrays.results()


def conversation(submission: Submission, answer: Callable[..., Any]) -> Any:
    """The result of a conversation. SubmissionError as from `JudgedProcess.converse`."""
    with closing(SharedArrays([])) as arrays, judged(submission, arrays) as process:
        return process.converse(answer)


def race(submission: Submission, task: Task, rng: np.random.Generator, *, turns: int = TURNS) -> Speed | Finding:
    """The speed of a submission, in turns with the honest implementation and the reader. Each turn has a fresh process,
    so no process of the submission lives while another one is timed. A `Finding`: a timed round had a wrong result, or
    was impossible.
    """
    sides = [submission, task.honest, *([task.reader] if task.reader else [])]
    seconds: list[list[float]] = [[] for _ in sides]
    with closing(_Trial(task, rng)) as trial:
        try:
            for _ in range(turns):
                for index in rng.permutation(len(sides)):
                    side = sides[index]
                    if not isinstance(side, Submission):
                        trial.arrays.fill()
                        seconds[index].append(side(trial.arrays))
                        continue
                    with judged(side, trial.arrays) as process:
                        timed = _timed_round(process, trial.arrays)
                    if index == 0 and (problem := trial.problem() or _excess(timed, submission)):
                        return Finding(problem, process.in_force)
                    seconds[index].append(timed.seconds)
        except SubmissionError as error:
            return Finding(str(error))
    ours, honest, *readers = (np.array(of_side) for of_side in seconds)
    round_s, gb_s = float(np.median(ours)), trial.arrays.input_bytes / float(np.median(ours)) / 1e9
    ratio = planned_ratio(np.log(honest / ours), EPOCHS)
    if not readers:
        return Speed(round_s, ratio, None, gb_s)
    fastest_read = float(readers[0].min())  # other work on the machine slows reads down, and speeds none up
    if fastest_read > POSSIBLE * round_s:
        return Finding(
            f"its {round_s * 1e3:.2f} ms are impossible: only to read its inputs takes "
            f"{fastest_read * 1e3:.2f} ms; what does it leave out?"
        )
    return Speed(round_s, ratio, planned_ratio(np.log(readers[0] / ours), EPOCHS), gb_s)


def _timed_round(process: JudgedProcess, arrays: SharedArrays) -> Round:
    """A round that warms up with other values, then the timed one."""
    arrays.fill(other=True)
    process.one_round()
    arrays.fill()
    return process.one_round()


def _excess(timed: Round, submission: Submission) -> str:
    """Whether more processors worked than the threads that a submission may have; empty: no."""
    if timed.processor_s <= EXTRA_PROCESSOR_S + EXTRA_PROCESSOR * submission.threads * timed.seconds:
        return ""
    threads = f"{submission.threads} thread{'s' if submission.threads > 1 else ''}"
    took = f"{timed.processor_s * 1e3:.0f} ms of processor time within {timed.seconds * 1e3:.0f} ms"
    return f"it took {took}, more than {threads} can"


class _Trial:
    """Questions that were drawn for a submission, and the errors that their answers may have."""

    def __init__(self, task: Task, rng: np.random.Generator) -> None:
        self._questions = task.draw(rng)
        self.arrays = SharedArrays([question.call for question in self._questions])
        try:
            self._allowed = self._allowed_errors(task.honest)  # by result
        except BaseException:
            self.close()
            raise

    def _allowed_errors(self, honest: Submission | Here) -> list[float]:
        """The error that is allowed in each result of a call, relative to its scale: a multiple of the honest one."""
        plain = [question.plain for question in self._questions]
        if isinstance(honest, Submission):
            try:
                with judged(honest, self.arrays) as process:
                    self.arrays.fill()
                    process.one_round()
            except SubmissionError as error:
                raise RunError(f"the plain implementation {honest.function} failed: {error}") from None
            plain = list(self.arrays.results())
        errors = [
            [
                float(_error(*pair).max(initial=0.0)) / _scale(pair[1])
                for pair in zip(got or (), question.expected, strict=True)
            ]
            for question, got in zip(self._questions, plain, strict=True)
        ]
        return [max(LEAST_ERROR, HONEST_TIMES * max(of_result)) for of_result in zip(*errors, strict=True)]

    def _answers(self) -> Iterator[tuple[Question, Sequence[NDArray[Any]]]]:
        return zip(self._questions, self.arrays.results(), strict=True)

    def problem(self) -> str:
        """The first wrong result; empty: all are right."""
        if outside := self.arrays.written_outside():
            return f"it wrote outside of {outside}"
        for number, (question, got) in enumerate(self._answers(), 1):
            for index, (result, right) in enumerate(zip(got, question.expected, strict=True)):
                most = self._allowed[index] * _scale(right)
                if not (_error(result, right) <= most).all():
                    sentence = _difference(index, result, right, most) + _mistake(question, got)
                    about = f", {question.about}" if question.about else ""
                    return f"{sentence} (call {number} of {len(self._questions)}{about})"
        return ""

    def close(self) -> None:
        self.arrays.close()


def _mistake(question: Question, got: Sequence[NDArray[Any]]) -> str:
    """The mistake that gives these results."""
    for sentence, wrong in question.mistakes.items():
        if all((_error(*pair) <= ALIKE * _scale(pair[1])).all() for pair in zip(got, wrong, strict=True)):
            return f": {sentence}"
    return ""


def _difference(index: int, result: NDArray[Any], right: NDArray[np.float64], most: float) -> str:
    """The first number of a result whose error is above `most`, and how many there are, in words."""
    wrong = ~(_error(result, right) <= most)
    first = int(np.flatnonzero(wrong)[0])
    place, got = [int(i) for i in np.unravel_index(first, wrong.shape)], float(result.reshape(-1)[first])
    where = f"result {index} at {place}"
    others = f"; {int(wrong.sum()):,} of its {wrong.size:,} numbers are wrong"
    if np.isnan(got):
        return f"{where} is {got}: not written, or computed from unwritten values or an overflow{others}"
    return f"{where} is {got:.6g}, expected {float(right.reshape(-1)[first]):.6g}{others}"


def _error(result: NDArray[Any], right: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.abs(result.astype(np.float64) - right))


def _scale(right: NDArray[np.float64]) -> float:
    """The largest magnitude of a result."""
    return float(np.abs(right).max(initial=0.0)) or 1.0
