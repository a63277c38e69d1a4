"""`compare` measures a candidate against one or several baselines on one case."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from labkit.engine.team_size import team_size
from labkit.harness.compare.against import installed, other_version
from labkit.harness.compare.choosing import sample_text
from labkit.harness.compare.installation import pinned
from labkit.harness.compare.interleave import take_turns
from labkit.harness.compare.plan import QUEUE, Schedule, SideSpec, check_sides
from labkit.harness.compare.sampling import Turns
from labkit.harness.compare.sides import side_row
from labkit.harness.comparison import Comparison
from labkit.harness.results import save_or_warn
from labkit.harness.runs import Case
from labkit.system.asked_from import given
from labkit.system.bounds import check_numbers
from labkit.system.errors import UserError
from labkit.system.output_folder import RUNS
from labkit.system.partly import Show
from labkit.system.progress import Progress

BASELINE = "hf-eager"
BUDGET_S = 60.0
PRECISION_AGAINST = 0.01  # of two versions of one side, which differ by little


def compare(
    baseline: str | None = None,
    candidate: str = "fused",
    *,
    model: str,
    against: str | os.PathLike[str] | None = None,
    dtype: str = "float32",
    batch: int = 1,
    prompt: int = 128,
    new: int = 128,
    threads: int | None = None,
    tp: int = 1,
    pp: int = 1,
    schedule: str = QUEUE,
    memory_gb: float | None = None,
    sample: str | Mapping[str, float] | None = None,
    rounds: int | None = None,
    budget_s: float | None = None,
    precision: float | None = None,
    wait_quiet_s: float | None = None,
    question: str = "",
    seed: int = 0,
    output: str | os.PathLike[str] | None = RUNS,
    write: bool = True,
    progress: Progress | None = None,
    show: Show | None = None,
) -> Comparison:
    """Measures `candidate` against `baseline`, sides that `labkit sides` lists, on the model `model`. The baseline is
    "hf-eager" by default.

    against: another version of labkit, whose candidate is the baseline: a commit of the checkout from which the
    installed labkit comes, a folder with labkit/ in it, or a Python environment that has a labkit. Both sides read the
    same pages of weights where both versions pack them alike, and their threads have the same processors. Without a
    `precision` and without `rounds` it is measured until the interval is 1 % wide.

    Both generate `new` tokens without an early end of text, by default greedily, for the same `batch` random prompts
    of `prompt` tokens. Each round has new prompts. They run on the current GPU, else on `threads` threads (None:
    as many as the engine takes).

    tp: the candidate, a fused side, is cut for `tp` ranks of `threads` threads each (None: an equal share of the
    cores). The baseline has `threads` threads in all, so `limit_ratio` is the gain that memory allows the ranks.

    pp: the candidate's layers are on `pp` stages of `tp` ranks each, with this `schedule` ("queue", "rounds",
    "barrier", "naive"). The baseline then has as many threads in all as these ranks together. "hf-pipeline",
    transformers' own, has `pp` stages too. A baseline may be on ranks of its own, by its name: "fused-tp2",
    "fused-pp2-naive"; in "fused-ep2" each has half of the experts.

    memory_gb: limit of each side's memory beyond its imports, in GB (1e9 bytes), from loading on; None: no limit.

    sample: both sides sample with these settings of transformers' `generate`, such as "top_p=0.9,temperature=0.8" or a
    mapping, and with the same seed. Other settings have transformers' defaults: top_k is 50. None: greedy search.

    The sides take turns of a few tokens, in epochs; between two epochs both put their weights into new memory, because
    their place alone makes a step 1 to 3 % faster or slower. If a side cannot pause in the middle of a generation,
    whole generations take turns, in rounds, and the record says why.

    budget_s: add epochs or rounds until the comparison is decided or this many seconds are spent, as
    `labkit.statistics.sequential` describes. None: 60 seconds, or no budget where `rounds` is given.

    rounds: a fixed number of epochs or rounds; with a `budget_s` it is the least number.

    precision: go on until the upper end of the interval is only this fraction above its lower end, or the budget is
    spent; None: a verdict is enough.

    wait_quiet_s: wait at most this long until other programs leave the processors alone, then give up.

    question: both sides answer it once after the timed runs, if the model was trained for conversations.

    output: folder in which the record is written, at the end and whole; None: it is not written. An unwritable folder
    is refused before anything is measured. Later problems with it are warnings, and the result is still returned.

    write: False: the folder is only checked, and the caller saves the record.

    show: gets the comparison after each epoch from the third on, and when all are done, before stages and answers.

    An interrupt (Ctrl-C) after two epochs ends the comparison with what was measured, and after the timed runs without
    stages and answers; before that it is raised.

    UserError: an impossible name, size or dtype. NotQuietError: the machine did not become quiet. WorkerError: a side's
    process failed, or needs more memory than it may have.
    """
    case = comparison_case(
        model=model,
        dtype=dtype,
        batch=batch,
        prompt=prompt,
        new=new,
        threads=threads,
        tp=tp,
        pp=pp,
        schedule=schedule,
        memory_gb=memory_gb,
        sample=sample,
    )
    if rounds is None and budget_s is None:
        budget_s = BUDGET_S
    if against is not None and rounds is None and precision is None:
        precision = PRECISION_AGAINST
    how_long: dict[str, Any] = {"rounds": rounds, "budget_s": budget_s, "precision": precision}
    order = Schedule(**how_long, seed=seed, wait_quiet_s=wait_quiet_s, question=question)
    timed = None if show is None else (lambda turns: show(turns.comparison(0, -1)))
    measured: dict[str, Any] = {"output": output, "progress": progress, "show": timed}
    if against is None:
        (comparison,) = compare_with_each((baseline or BASELINE,), candidate, case, order, **measured)
    else:
        comparison = _compare_versions(against, baseline, candidate, case, order, **measured)
    if output is not None and write:
        save_or_warn(comparison, output)
    return comparison


def comparison_case(
    *,
    model: str,
    dtype: str,
    batch: int,
    prompt: int,
    new: int,
    threads: int | None = None,
    tp: int = 1,
    pp: int = 1,
    schedule: str = QUEUE,
    memory_gb: float | None = None,
    sample: str | Mapping[str, float] | None = None,
) -> Case:
    """The case of a candidate on `pp` stages of `tp` ranks. `threads` None: each rank gets an equal share of the
    engine's threads. UserError for numbers beyond their bounds, and for a schedule without stages.
    """
    check_numbers(batch=batch, prompt=prompt, new=new, threads=threads, tp=tp, pp=pp, memory_gb=memory_gb)
    if pp == 1 and schedule != QUEUE:
        raise UserError(f"got schedule = {schedule!r} for one stage; pass pp=2 or more, or leave the schedule out")
    return Case(
        model=model,
        dtype=dtype,
        batch=batch,
        prompt_tokens=prompt,
        new_tokens=new,
        threads=max(1, team_size() // max(1, tp * pp)) if threads is None else threads,
        tp=tp,
        pp=pp,
        schedule=schedule if pp > 1 else "",
        memory_gb=memory_gb,
        sample=sample_text(sample),
    )


def compare_with_each(
    baselines: Sequence[str],
    candidate: str,
    case: Case,
    schedule: Schedule,
    *,
    output: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    show: Callable[[Turns], None] | None = None,
) -> tuple[Comparison, ...]:
    """Measures a candidate, on the ranks of the case, against several baselines in the same rounds. Baselines may be
    peers, such as "llama.cpp". `take_turns` describes the other parameters.
    """
    sides = [*(_baseline(name, case) for name in baselines), _candidate(candidate, case)]
    turns = take_turns(sides, case, schedule, output=output, progress=progress, show=show)
    return tuple(turns.comparison(index, -1) for index in range(len(baselines)))


def _compare_versions(
    against: str | os.PathLike[str], baseline: str | None, candidate: str, case: Case, schedule: Schedule, **how: Any
) -> Comparison:
    """Measures a candidate of the installed labkit against the same candidate of another version."""
    if baseline not in (None, candidate):
        raise UserError(
            f"got {given('against', str(against))} and {given('baseline', str(baseline))}; the baseline is {candidate} "
            "in that version: leave it out"
        )
    ours = _candidate(candidate, case)
    check_sides([ours], case)
    threads = pinned(ours.threads) if ours.ranks == 1 else {}
    with other_version(against) as other, installed() as present:
        sides = [replace(ours, installation=installation.with_variables(threads)) for installation in (other, present)]
        turns = take_turns(sides, case, schedule, **how)
    return turns.comparison(0, -1)


def _candidate(name: str, case: Case) -> SideSpec:
    return SideSpec(name, case.threads, case.tp, case.pp, case.schedule or QUEUE)


def _baseline(name: str, case: Case) -> SideSpec:
    """The side of a baseline that is compared with the candidate of the case. `compare` describes its threads."""
    side = SideSpec.named(name, case.cores)
    if side_row(side.name).weights == "stages" and side.pp == 1:
        return replace(side, threads=case.threads * case.tp, pp=case.pp)
    return replace(side, threads=case.threads) if case.pp == side.ranks == 1 else side
