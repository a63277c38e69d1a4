"""`make bench`: measures this machine against the targets, and writes the records and a page about them.

python -P -m labkit.bench.models [--quick] [--only MODEL or CASE] [--fresh] [--output FOLDER]

Each case has a fixed number of epochs, so that the intervals of all cases are alike. In an epoch the sides take turns
of a few tokens for about a second, with their weights in new memory.

The files are rewritten after each case, so that a stopped run can be continued: a case of the same day, machine, commit
and settings is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import typer
from rich.markup import escape

from labkit.bench.page import (
    BenchFiles,
    EpochCount,
    Output,
    Quick,
    Threads,
    err,
    followed,
    llama_cpp_is_missing,
    machine_of,
    out,
    stop_if_interrupted,
)
from labkit.bench.report import key, report, rows, summary
from labkit.bench.targets import NEW, PROMPT, TARGETS, Target
from labkit.engine.team_size import team_size
from labkit.harness.compare.compare import compare_with_each, comparison_case
from labkit.harness.compare.loaded_side import comparison_device
from labkit.harness.compare.peers.llama_cpp import LLAMA_CPP, LLAMA_CPP_INT8
from labkit.harness.compare.plan import Schedule
from labkit.harness.comparison import Comparison
from labkit.harness.environment import read_environment
from labkit.harness.regions.case import shape_of
from labkit.harness.roofline import count_work, probe_bandwidth
from labkit.harness.turns.looks import EPOCH_S, FEWEST_PAIRS, FEWEST_STEPS
from labkit.models.dtypes import FLOAT_DTYPES
from labkit.system.command import run_command

ROUNDS, WARM_UP = 6, 16  # epochs; new tokens of the untimed run
QUICK_ROUNDS, QUICK_NEW = 2, 8
# Rough speeds, only for the estimate of the duration.
LIMIT_SHARES = {"hf-eager": 0.22, LLAMA_CPP: 0.45, LLAMA_CPP_INT8: 0.3}
OUR_SHARE = 0.7
GFLOP_S = {"float32": 130.0, "bfloat16": 400.0}
START_S, LOAD_S_PER_GB, CONVERT_S_PER_GB = 5.0, 3.0, 8.0
GB_S = 20.0  # used if the read bandwidth cannot be probed


@dataclass(frozen=True)
class Settings:
    """The settings of all cases of one call."""

    new: int  # tokens to generate
    rounds: int  # epochs
    threads: int
    peer: bool  # whether llama.cpp is measured, too

    def baselines(self, target: Target) -> tuple[str, ...]:
        sides = target.sides
        return (sides.baseline, sides.peer) if self.peer and target.llama_cpp is not None else (sides.baseline,)


def main(
    quick: Quick = False,
    only: Annotated[list[str] | None, typer.Option(help="A model or a case ('gpt2 int8'); may be repeated.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure cases again that were already measured.")] = False,
    output: Output = None,
    threads: Threads = None,
    rounds: EpochCount = ROUNDS,
) -> None:
    """Measure this machine against the targets."""
    targets = _select(only)
    settings = Settings(
        new=QUICK_NEW if quick else NEW,
        rounds=QUICK_ROUNDS if quick else rounds,
        threads=threads or team_size(),
        peer=not llama_cpp_is_missing(),
    )
    environment = read_environment(settings.threads)
    files = BenchFiles.of(machine_of(environment), quick=quick, output=output)
    records = files.kept(Comparison)
    todo = [target for target in targets if fresh or not _done(target, settings, records, environment.commit)]
    minutes = sum(_seconds(target, settings) for target in todo) / 60
    kept = f", {len(targets) - len(todo)} kept from {files.records}" if len(todo) < len(targets) else ""
    out.print(f"about {minutes:.0f} min for {len(todo)} cases{kept}", soft_wrap=True)

    failed = False
    for target in todo:
        comparisons = _attempt(target, settings)
        if comparisons is None:
            failed = True
            continue
        records = [record for record in records if key(record) != target.key] + list(comparisons)
        files.write(records, report(records))
        stop_if_interrupted(comparisons)
        out.print(f"{target.name}: {escape(summary(rows(comparisons)[0]))}", soft_wrap=True)
    if records:
        files.finish(records, report(records))
    raise typer.Exit(1 if failed else 0)


def _select(names: Sequence[str] | None) -> list[Target]:
    models, cases = dict.fromkeys(target.model for target in TARGETS), [target.name for target in TARGETS]
    for name in names or ():
        if name not in models and name not in cases:
            expected = f"one of {', '.join(models)}, or one of their cases: {', '.join(cases)}"
            raise typer.BadParameter(f"got {name!r}, expected {expected}", param_hint="--only")
    return [target for target in TARGETS if not names or {target.model, target.name} & set(names)]


def _attempt(target: Target, settings: Settings) -> tuple[Comparison, ...] | None:
    """Measures a case. If it fails, the console says why, and the case is measured again without its peer. None: the
    case failed without its peer, too.
    """
    try:
        return _measure(target, settings)
    except (RuntimeError, ValueError, OSError) as error:
        err.print(f"error: {target.name}: {escape(str(error))}", style="red", soft_wrap=True)
    if settings.baselines(target) == (target.sides.baseline,):
        return None
    err.print(f"{target.name}: again without {target.sides.peer}", soft_wrap=True)
    return _attempt(target, replace(settings, peer=False))


def _measure(target: Target, settings: Settings) -> tuple[Comparison, ...]:
    with followed(target.name) as follow:
        return compare_with_each(
            settings.baselines(target),
            target.sides.candidate,
            comparison_case(
                model=target.model,
                dtype=target.dtype,
                batch=target.batch,
                prompt=PROMPT,
                new=settings.new,
                threads=settings.threads,
            ),
            Schedule(rounds=settings.rounds, warm_up=min(WARM_UP, settings.new), stages=False),
            progress=follow,
        )


def _done(target: Target, settings: Settings, records: Sequence[Comparison], commit: str | None) -> bool:
    baselines = {
        record.baseline.name
        for record in records
        if key(record) == target.key
        and (record.case.threads, record.case.new_tokens, record.rounds)
        == (settings.threads, settings.new, settings.rounds)
        and record.candidate.environment.commit == commit
    }
    return baselines.issuperset(settings.baselines(target))


def _seconds(target: Target, settings: Settings) -> float:
    """The estimated duration of this case, from its bytes to read and its FLOPs. For int8 it is an upper bound."""
    work = count_work(shape_of(target.model), FLOAT_DTYPES[target.dtype], target.batch, PROMPT, settings.new)
    floor_s = work.floor_ms(probe_bandwidth(settings.threads, comparison_device()) or GB_S) / 1e3
    prompt_s, step_s = (flops / GFLOP_S[target.dtype] / 1e9 for flops in (work.prefill_flops, work.decode_flops))
    baselines = settings.baselines(target)
    total = CONVERT_S_PER_GB * work.weight_bytes / 1e9 if target.sides.peer in baselines else 0.0
    sides = (*baselines, target.sides.candidate)
    total += len(sides) * (START_S + LOAD_S_PER_GB * work.weight_bytes / 1e9)
    shortest_s = sum(FEWEST_STEPS * max(step_s, floor_s / LIMIT_SHARES.get(side, OUR_SHARE)) for side in sides)
    return total + settings.rounds * (len(sides) * prompt_s + max(EPOCH_S, FEWEST_PAIRS * shortest_s))


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
