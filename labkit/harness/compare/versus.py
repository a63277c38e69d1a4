"""`compare`: a candidate against a baseline, or against several, on one case."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from labkit.harness.compare.interleave import take_turns
from labkit.harness.compare.plan import Schedule, SideSpec
from labkit.harness.comparison import Comparison
from labkit.harness.records import Case
from labkit.harness.results import save_or_warn
from labkit.system.output_folder import RUNS
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
    memory_gb: float | None = None,
    rounds: int = 7,
    budget_s: float | None = None,
    wait_quiet_s: float | None = None,
    question: str = "",
    seed: int = 0,
    output: str | os.PathLike[str] | None = RUNS,
    progress: Progress | None = None,
) -> Comparison:
    """Measure `candidate` against `baseline`, names of `labkit.harness.compare.baselines`, on the model called `model`.

    Both generate `new` greedy tokens (no end-of-text before) for the same `batch` random prompts of `prompt` tokens,
    new ones each round, on the current GPU, else on `threads` threads (None: as many as torch would use).

    tp: the candidate, a fused one, is cut for as many ranks of `threads` threads each (None: the cores shared out);
    the baseline has `threads` threads in all, so that `limit_ratio` says what the memory allows them to gain.

    memory_gb: what each side may take beside its imports, in GB (1e9 bytes), from where it loads the weights; None: all
    that there is.

    budget_s: add rounds until the comparison is decided or so many seconds are spent, as
    `labkit.statistics.sequential` describes; None: `rounds` rounds.

    wait_quiet_s: wait for so many seconds at most until other programs leave the processors alone, and give up then.

    question: answered by both sides once behind the timed runs, where the model was trained for conversations.

    The record is also written under the folder `output`, at the end and whole; None: not written. A folder that cannot
    be written to is refused before anything is measured, and what goes wrong with it later is a warning: the result is
    returned all the same.

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
        memory_gb=memory_gb,
    )
    schedule = Schedule(rounds=rounds, budget_s=budget_s, seed=seed, wait_quiet_s=wait_quiet_s, question=question)
    (found,) = compare_with_each((baseline,), candidate, case, schedule, output=output, progress=progress)
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
    memory_gb: float | None = None,
) -> Case:
    """The case of a candidate on `tp` ranks. `threads` None: as many as torch would use, shared out among the ranks."""
    return Case(
        model=model,
        dtype=dtype,
        batch=batch,
        prompt_tokens=prompt,
        new_tokens=new,
        threads=max(1, torch.get_num_threads() // max(1, tp)) if threads is None else threads,
        tp=tp,
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
) -> tuple[Comparison, ...]:
    """Measure a candidate, on the ranks of the case, against several baselines, "llama.cpp" too, each on one rank, all
    of them in the same rounds. The rest is as for `take_turns`.
    """
    sides = [SideSpec(name, case.threads) for name in baselines] + [SideSpec(candidate, case.threads, case.tp)]
    turns = take_turns(sides, case, schedule, output=output, progress=progress)
    return tuple(turns.comparison(which, -1) for which in range(len(baselines)))
