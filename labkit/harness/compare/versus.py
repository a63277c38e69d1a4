"""`compare`: a candidate against a baseline, or against several, on one case."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from labkit.harness.compare.interleave import Turns, take_turns
from labkit.harness.compare.plan import QUEUE, Schedule, SideSpec
from labkit.harness.compare.providers import provider_of
from labkit.harness.comparison import Comparison
from labkit.harness.records import Case
from labkit.harness.results import save_or_warn
from labkit.system.bounds import check_numbers
from labkit.system.errors import UserError
from labkit.system.output_folder import RUNS
from labkit.system.partly import Show
from labkit.system.progress import Progress


def compare(
    baseline: str = "hf-eager",
    candidate: str = "fused",
    *,
    model: str,
    dtype: str = "float32",
    batch: int = 1,
    prompt: int = 128,
    new: int = 128,
    threads: int | None = None,
    tp: int = 1,
    pp: int = 1,
    schedule: str = QUEUE,
    memory_gb: float | None = None,
    rounds: int = 7,
    budget_s: float | None = None,
    wait_quiet_s: float | None = None,
    question: str = "",
    seed: int = 0,
    output: str | os.PathLike[str] | None = RUNS,
    progress: Progress | None = None,
    show: Show | None = None,
) -> Comparison:
    """Measure `candidate` against `baseline`, names of `labkit.harness.compare.baselines`, on the model called `model`.

    Both generate `new` greedy tokens (no end-of-text before) for the same `batch` random prompts of `prompt` tokens,
    new ones each round, on the current GPU, else on `threads` threads (None: as many as torch would use).

    tp: the candidate, a fused one, is cut for as many ranks of `threads` threads each (None: the cores shared out);
    the baseline has `threads` threads in all, so that `limit_ratio` says what the memory allows them to gain.

    pp: the layers of the candidate are on as many stages, of `tp` ranks each, with this `schedule` ("queue", "rounds",
    "barrier", "naive"). Like is compared with like: the baseline then has as many threads in all as all these ranks.
    "hf-pipeline", transformers' own, has as many stages. A baseline may be on ranks too, as its name says: "fused-tp2",
    "fused-pp2-naive".

    memory_gb: what each side may take beside its imports, in GB (1e9 bytes), from where it loads the weights; None: all
    that there is.

    budget_s: add rounds until the comparison is decided or so many seconds are spent, as
    `labkit.statistics.sequential` describes; None: `rounds` rounds.

    wait_quiet_s: wait for so many seconds at most until other programs leave the processors alone, and give up then.

    question: answered by both sides once behind the timed runs, where the model was trained for conversations.

    The record is also written under the folder `output`, at the end and whole; None: not written. A folder that cannot
    be written to is refused before anything is measured, and what goes wrong with it later is a warning: the result is
    returned all the same.

    show: given the comparison once its rounds are done, before stages and answers.

    UserError: a name, size or dtype that cannot be. NotQuietError: the machine did not become quiet. WorkerError: a
    side's process failed, or needs more memory than it may have.
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
    )
    order = Schedule(rounds=rounds, budget_s=budget_s, seed=seed, wait_quiet_s=wait_quiet_s, question=question)
    timed = None if show is None else (lambda turns: show(turns.comparison(0, -1)))
    (found,) = compare_with_each((baseline,), candidate, case, order, output=output, progress=progress, show=timed)
    if output is not None:
        save_or_warn(found, output)
    return found


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
) -> Case:
    """The case of a candidate on `pp` stages of `tp` ranks. `threads` None: as many as torch would use, shared out
    among the ranks. UserError for numbers beyond their bounds, and for a schedule without stages.
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
        threads=max(1, torch.get_num_threads() // max(1, tp * pp)) if threads is None else threads,
        tp=tp,
        pp=pp,
        schedule=schedule if pp > 1 else "",
        memory_gb=memory_gb,
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
    """Measure a candidate, on the ranks of the case, against several baselines, "llama.cpp" too, all of them in the
    same rounds. The rest is as for `take_turns`.
    """
    ours = SideSpec(candidate, case.threads, case.tp, case.pp, case.schedule or QUEUE)
    sides = [*(_baseline(name, case) for name in baselines), ours]
    turns = take_turns(sides, case, schedule, output=output, progress=progress, show=show)
    return tuple(turns.comparison(which, -1) for which in range(len(baselines)))


def _baseline(name: str, case: Case) -> SideSpec:
    """A baseline beside the candidate of the case."""
    side = SideSpec.named(name, case.cores)
    provider = provider_of(side.name)
    if provider is not None and provider.staged and side.pp == 1:
        return replace(side, threads=case.threads * case.tp, pp=case.pp)
    return replace(side, threads=case.threads) if case.pp == side.ranks == 1 else side
