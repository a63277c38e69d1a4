"""The check of a C++ file: it is compiled, judged, and raced against a plain implementation where speed counts."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from labkit.harness.judge.compiling import CompileError, compiled
from labkit.harness.judge.judge import Finding, Question, Speed, Task, check, race
from labkit.harness.judge.judged_process import Submission
from labkit.notebooks.workshop.exercises import Attempt, Remark, Report

UNSURE_GAIN, UNSURE_SHARE = 2.5, 1.3  # upper / lower end of an interval, above which it decides nothing
OTHERS_RAN = ". This interval is too wide: other programs ran; check again"
Draw = Callable[[np.random.Generator], Sequence[Question]]


@dataclass(frozen=True)
class Kernel:
    """A C function that a learner writes.

    kinds: of its arguments, as in `Submission`.
    honest: a file with a right and plain implementation.
    """

    file: str
    function: str
    kinds: str
    honest: Path
    threads: int = 1

    def submission(self, source: Path, folder: Path) -> Submission:
        """The compiled file. CompileError if the compiler refuses it."""
        folder.mkdir()
        return Submission(compiled(source, folder), self.function, kinds=self.kinds, threads=self.threads)


@dataclass(frozen=True)
class Goal:
    """How fast a kernel has to be.

    draw: the questions of a timed round.
    reader: a file with the function `read_only`, which reads what the kernel has to read; None: no share is known.
    share: of the limit, at least; None: it does not count.
    gain: times as fast as the honest implementation, at least; None: it does not count.
    """

    draw: Draw
    reader: Path | None = None
    share: float | None = None
    gain: float | None = None


def check_kernel(work: Attempt, kernel: Kernel, draw: Draw, goal: Goal | None = None) -> Report:
    """What is right and wrong about a learner's kernel."""
    rng = work.random
    with tempfile.TemporaryDirectory(prefix="labkit-workshop-") as temporary:
        try:
            submission = kernel.submission(work.folder / kernel.file, Path(temporary, "submission"))
        except CompileError as error:
            return Report((Remark(f"{kernel.file}: {error}", right=False),))
        honest = kernel.submission(kernel.honest, Path(temporary, "honest"))
        finding = check(submission, Task(draw, honest), rng)
        if not finding.right:
            return Report((Remark(f"`{kernel.function}`: {finding.problem}", right=False),))
        confined = f" (confined by {', '.join(finding.in_force)})"
        right = Remark(f"`{kernel.function}` gives the right results on newly drawn inputs{confined}", right=True)
        if goal is None:
            return Report((right,))
        reader = None
        if goal.reader is not None:
            of_reader = replace(kernel, function="read_only")
            reader = of_reader.submission(goal.reader, Path(temporary, "reader"))
        speed = race(submission, Task(goal.draw, honest, reader), rng)
        if isinstance(speed, Finding):
            return Report((right, Remark(speed.problem, right=False)))
        return Report((right, *speed_remarks(speed, goal)))


def speed_remarks(speed: Speed, goal: Goal) -> list[Remark]:
    """Whether a measured speed reaches the goal. A goal that an interval does not decide is to be checked again."""
    remarks = []
    if goal.gain is not None:
        reached = speed.ratio.value >= goal.gain and speed.ratio.low > 1
        gained = f"{speed.ratio.value:.2f} {speed.ratio.interval}"
        words = f"{gained} times as fast as the plain version; the goal is {goal.gain:g}, with an interval above 1"
        wide = speed.ratio.high > UNSURE_GAIN * speed.ratio.low
        if wide or speed.ratio.low <= 1 <= goal.gain <= speed.ratio.value:
            reached, words = False, words + OTHERS_RAN
        remarks.append(Remark(words, right=reached))
    if goal.share is not None and (share := speed.share) is not None:
        interval = f"[{share.low:.0%}, {share.high:.0%}]"
        words = f"it reads {speed.gb_s:.1f} GB/s, {share.value:.0%} {interval} of the memory's rate; the goal is "
        words += f"{goal.share:.0%}"
        wide = share.high > UNSURE_SHARE * share.low
        if share.value < goal.share and wide:
            words += OTHERS_RAN
        remarks.append(Remark(words, right=share.value >= goal.share or (share.high >= goal.share and not wide)))
    return remarks
