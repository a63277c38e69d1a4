"""`take_turns` runs the same case on several sides beside each other, each side in processes of its own.

A shared machine drifts within seconds, so sides must run close together in time: in turns of a few tokens where they
can pause, else in turns of whole generations.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from labkit.harness.compare.conversion import converted
from labkit.harness.compare.loaded_side import comparison_device
from labkit.harness.compare.loader import FolderLoader, loader_of
from labkit.harness.compare.measured_side import MeasuredSide
from labkit.harness.compare.plan import Prepared, Schedule, SideSpec, labels, prepare
from labkit.harness.compare.sampling import Sampling, Steps, Turns, last_is_decided
from labkit.harness.compare.side_process import SideProcesses
from labkit.harness.compare.weight_sharing import WeightSharing
from labkit.harness.compare.whole_runs import WholeRuns
from labkit.harness.quiet import wait_until_quiet
from labkit.harness.records import Measurement
from labkit.harness.runs import Case
from labkit.harness.turns.epochs import Epochs, why_not
from labkit.statistics.kept_resolutions import resolution_for
from labkit.statistics.resolution import MINUTE_S, TellsApart
from labkit.statistics.sequential import EPOCHS
from labkit.system.output_folder import check_output_folder
from labkit.system.partly import so_far
from labkit.system.progress import Progress

UNTIMED = frozenset({"stages", "stage_run", "rank_stages", "answer"})  # fields that are measured after the rounds


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
    """Measures sides beside each other. Each side has its own threads and ranks, instead of the case's.

    decided: whether the rounds so far are enough, for a schedule with a budget.
    output: a folder for the caller's records, checked and made before anything is measured.
    show: gets the epochs so far between two of them, and what was timed when it is done, before stages and answers.

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
    steps_per_side = 1 + schedule.least(EPOCHS) + schedule.stages + bool(schedule.question)
    steps = Steps(conversions + len(sides) * steps_per_side, progress)
    with ExitStack() as stack:
        folders = _folders(sides, prepared, schedule, steps, stack)
        measured_sides = [
            MeasuredSide(
                name,
                side,
                stack.enter_context(SideProcesses(name, side.threads, side.ranks, side.installation)),
                prepared,
                schedule,
            )
            for name, side in zip(labels(sides), sides, strict=True)
        ]
        for index, measured in enumerate(measured_sides):
            steps.begin(f"loading and warming up {measured.name}")
            measured.load(folders.get(index))
        for measured in measured_sides:
            measured.note_peak()
        timed = None if show is None else (lambda turns: show(_timed(turns)))
        sampling = _sampling(measured_sides, case, schedule, decided, steps, timed)
        sampling.run()
        if sampling.result().interrupted:  # a side may still be in the middle of an answer
            return sampling.result()
        for measured in measured_sides:
            measured.note_peak()
            measured.note_memory()
            measured.note_reading()
        if timed:
            timed(sampling.result())
        try:
            _note_untimed(measured_sides, schedule, steps)
        except KeyboardInterrupt:  # what was timed is complete
            return replace(sampling.result(), interrupted=True)
    steps.end()
    return sampling.result()


def _note_untimed(sides: Sequence[MeasuredSide], schedule: Schedule, steps: Steps) -> None:
    for side in sides if schedule.stages else ():
        steps.begin(f"stages of {side.name}")
        side.note_stages()
    for side in sides if schedule.question else ():
        steps.begin(f"an answer of {side.name}")
        side.note_answer()


def _sampling(
    sides: list[MeasuredSide],
    case: Case,
    schedule: Schedule,
    decided: Callable[[Turns], bool],
    steps: Steps,
    show: Callable[[Turns], None] | None,
) -> Sampling:
    """Turns of a few tokens, or whole generations where the schedule wants them or a side cannot pause."""
    reason = "the schedule asked for it"
    if schedule.turns:
        reason = _without_turns(sides) or why_not(sides, case.new_tokens, case.memory_gb)
    if reason:
        return WholeRuns(sides, schedule, decided, steps, why_rounds=reason)
    sharing = WeightSharing(sides) if any(side.spec.installation.version for side in sides) else None
    tells_apart = _tells_apart(sides, schedule)
    return Epochs(
        sides, schedule, decided, steps, new_tokens=case.new_tokens, tells_apart=tells_apart, show=show, sharing=sharing
    )


def _without_turns(sides: Sequence[MeasuredSide]) -> str:
    older = [side.name for side in sides if not side.knows_turns]
    return f"{', '.join(older)} is a version from before turns of a few tokens" if older else ""


def _tells_apart(sides: Sequence[MeasuredSide], schedule: Schedule) -> TellsApart | None:
    """The smallest difference that this machine tells apart within the schedule's budget, or within a minute if that is
    longer. If the sides' sizes differ, it is the larger one. None: it was not measured, or the sides run on a GPU, on
    which weights stay in their place.
    """
    if comparison_device().type != "cpu":
        return None
    seconds = max(MINUTE_S, schedule.budget_s or 0.0)
    sizes = {(side.weight_mb, side.spec.cores) for side in sides}
    measured = [resolution_for(weight_mb, cores) for weight_mb, cores in sizes if weight_mb is not None]
    known = [resolution.after(seconds) for resolution in measured if resolution is not None]
    return max(known, key=lambda tells: tells.difference, default=None)


def _timed(turns: Turns) -> Turns:
    """The measurements of the rounds alone, without stages and answers."""
    kept = ({name: value for name, value in side if name not in UNTIMED} for side in turns.sides)
    return replace(turns, sides=tuple(so_far(Measurement, **fields) for fields in kept))


def _folders(
    sides: Sequence[SideSpec], prepared: Prepared, schedule: Schedule, steps: Steps, stack: ExitStack
) -> dict[int, str]:
    """Folders with the files of sides that read their own, by index; they stay until the stack is closed."""
    folders: dict[int, str] = {}
    for index, side in enumerate(sides):
        if isinstance(loader_of(side.name), FolderLoader):
            steps.begin(f"preparing the weights for {side.name}")
            folder = converted(
                side.name,
                prepared.weights,
                dtype=prepared.case.dtype,
                seed=schedule.seed,
                scratch=None if side.installation.version else schedule.scratch,  # other versions may write other files
                installation=side.installation,
            )
            folders[index] = str(stack.enter_context(folder))
    return folders
