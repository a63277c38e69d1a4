"""`make bench`, the part about models larger than memory: streamed layers against the disk.

python -P -m labkit.bench.streaming [--model opt-1.3b] [--turns 4] [--scratch FOLDER] [--output FOLDER]
python -P -m labkit.bench.streaming --model gpt-neox-20b --only bfloat16 --turns 1 --rounds 1 --subject larger

Each case is an engine in a process of its own. The cases take turns in random order, and every prompt and every run of
decode steps has a probe of the disk before and behind it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

from labkit.bench.bars import SHARE, BarCheck, at_least, at_most
from labkit.bench.page import (
    BenchFiles,
    Output,
    Threads,
    checks_table,
    err,
    machine_of,
    markdown_table,
    page_of,
    print_checks,
    verdict,
)
from labkit.bench.targets import (
    STREAM_BESIDE,
    STREAM_HIDDEN,
    STREAM_MODEL,
    STREAM_RATIOS,
    STREAM_SHARE,
    STREAM_TARGETS,
    StreamTarget,
)
from labkit.engine.offload.footprint import Footprint
from labkit.engine.options import Options
from labkit.harness.environment import Environment, read_environment
from labkit.harness.rounds import random_orders
from labkit.harness.stream_record import StreamMeasurement
from labkit.models.policies import model_config_of
from labkit.models.shards import shard
from labkit.statistics import ratio
from labkit.system.child import run_child
from labkit.system.command import run_command
from labkit.system.errors import UserError
from labkit.system.progress import progress_bar
from labkit.weights.precision import precision_of
from labkit.weights.resolve import resolve

WORKER = "labkit.bench.stream_worker"
SLOTS = 3
PROMPT_NEW = 3  # tokens behind a long prompt, whose decode steps are those of the other cases


def main(
    model: Annotated[str, typer.Option(help="A preset or folder.")] = STREAM_MODEL,
    only: Annotated[list[str] | None, typer.Option(help="A case; may be given again.")] = None,
    turns: Annotated[int, typer.Option(min=1, help="Of each case, interleaved.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Prompts with the steps behind them, in each turn.")] = 2,
    new: Annotated[int, typer.Option(min=3, help="Tokens of a round.")] = 9,
    scratch: Annotated[Path | None, typer.Option(help="Folder on the disk that is measured.")] = None,
    subject: Annotated[str, typer.Option(help="How the files are named.")] = "streaming",
    threads: Threads = None,
    output: Output = None,
) -> None:
    """Measure how fast this machine streams a model."""
    targets = [target for target in STREAM_TARGETS if not only or target.name in only]
    if not targets:
        raise UserError(f"got --only {only}, expected some of {', '.join(target.name for target in STREAM_TARGETS)}")
    environment = read_environment(threads or torch.get_num_threads())
    files = BenchFiles.of(machine_of(environment), subject, output=output)
    with tempfile.TemporaryDirectory(dir=scratch or files.records.parent) as folder:
        found = measure(model, targets, Path(folder), turns, rounds, new, environment)
    files.write(found, page(found))
    print_checks(checks(found))
    files.name_page()


def measure(
    model: str,
    targets: Sequence[StreamTarget],
    folder: Path,
    turns: int,
    rounds: int,
    new: int,
    environment: Environment,
) -> list[StreamMeasurement]:
    """Runs the cases in turns. Packed weights are in `folder`, so only a first turn packs."""
    lines: list[list[dict[str, Any]]] = [[] for _ in targets]
    orders = random_orders(len(targets))
    with progress_bar(err) as follow:
        for turn in range(turns):
            for number, at in enumerate(next(orders)):
                target = targets[at]
                follow(turn * len(targets) + number, turns * len(targets), f"turn {turn + 1}: {target.name}")
                steps = min(new, PROMPT_NEW) if target.prompt > 1000 else new
                options = ("--rounds", rounds, "--new", steps, "--prompt", target.prompt, "--slots", SLOTS)
                command = [sys.executable, "-P", "-m", WORKER, model, target.precision, folder, *options]
                command += ["--resident-gb", resident_gb(model, target), "--threads", environment.threads]
                lines[at].append(json.loads(run_child([str(part) for part in command], f"{target.name} failed")))
    return [merged(model, target, of_turns, environment) for target, of_turns in zip(targets, lines, strict=True)]


def resident_gb(model: str, target: StreamTarget) -> float:
    """Memory for the part of the layers that stays, beside what is outside the layers and the slots."""
    options = Options(**precision_of(target.precision).options)
    config = model_config_of(resolve(model).hf_config)
    assert options.dtype is not None
    found = Footprint.of(shard(config), options.dtype, options.quant)
    return (found.outside + (SLOTS + target.resident * found.layers) * found.layer) / 1e9


def merged(
    model: str, target: StreamTarget, turns: Sequence[dict[str, Any]], environment: Environment
) -> StreamMeasurement:
    """The record of a case: what its turns have in common, the rounds of all of them, the highest peak."""
    return StreamMeasurement.model_validate(
        turns[0]
        | {
            "name": target.name,
            "model": model,
            "precision": target.precision,
            "batch": 1,
            "prompt_tokens": target.prompt,
            "threads": environment.threads,
            "slots": SLOTS,
            "environment": environment,
            "peak_bytes": max(turn["peak_bytes"] for turn in turns),
            "rounds": [each for turn in turns for each in turn["rounds"]],
        }
    )


def checks(found: Sequence[StreamMeasurement]) -> Iterator[BarCheck]:
    """The bars of streaming, for those cases that were measured."""
    for each in found:
        if each.prompt_tokens > 1000:
            yield from _hidden(each, "prompt")
            yield at_most(f"{each.name}: reads of a layer", round(each.reads_per_step, 1), 1.0)
        elif each.streamed_layers == each.layers:
            yield at_least(f"{each.name}: share of the disk", each.disk_share(), STREAM_SHARE, SHARE)
            yield from _hidden(each, "decode")
        else:
            yield at_most(f"{each.name}: step beside what is computed alone / disk", each.beside_floor(), STREAM_BESIDE)
    by_name = {each.name: each for each in found}
    for (slow, fast), bar in STREAM_RATIOS.items():
        if slow in by_name and fast in by_name:
            times = (by_name[slow].step_ms(), by_name[fast].step_ms())
            yield at_least(f"{slow} / {fast}", ratio(*times), bar)


def _hidden(found: StreamMeasurement, phase: Literal["prompt", "decode"]) -> Iterator[BarCheck]:
    """The bar of what is hidden, where there was something to hide."""
    if (share := found.hidden(phase)) is not None:
        yield at_least(f"{found.name}: hidden of the shorter", share, STREAM_HIDDEN, SHARE)


def page(found: Sequence[StreamMeasurement]) -> str:
    """The Markdown page of the records."""
    first = found[0]
    return page_of(
        f"Streaming on {first.environment.machine}",
        f"{first.model}, whose layers are read from a file for every step, past the page cache, into {first.slots} "
        f"slots; each case in a process of its own, in turns, {len(first.rounds)} rounds. The disk is probed before "
        "and behind each prompt and each run of decode steps, and its time is the bytes of a step over the mean of the "
        "two probes.",
        verdict([("streaming", check) for check in checks(found)]),
        markdown_table(
            ("case", "GB a step", "in memory", "prompt", "disk, GB/s", "step, ms", "of the disk", "hidden", "peak, GB"),
            [_row(each) for each in found],
        ),
        "In memory: weights and slots. Hidden: of the shorter of reading and computing, in the prompt / in decode "
        "steps. Peak: of the process, beyond what imports take.",
        checks_table(checks(found)),
        first.environment.origin,
    )


def _row(each: StreamMeasurement) -> tuple[str, ...]:
    rates = sorted(rate for one in each.rounds for rate in one.disk_gb_s)
    steps = sorted(each.step_ms())
    return (
        each.name,
        f"{each.streamed_bytes / 1e9:.2f} of {each.file_bytes / 1e9:.2f}",
        f"{each.resident_bytes / 1e9:.2f} GB",
        f"{each.prompt_tokens}",
        f"{rates[0]:.2f} to {rates[-1]:.2f}",
        f"{steps[len(steps) // 2]:.0f}",
        f"{each.disk_share().value:.0%} [{each.disk_share().low:.0%}, {each.disk_share().high:.0%}]",
        " / ".join(
            "–" if share is None else f"{share:.0%}" for share in (each.hidden("prompt"), each.hidden("decode"))
        ),
        f"{each.peak_bytes / 1e9:.2f}",
    )


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
