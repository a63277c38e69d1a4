"""`make bench`, the part about models larger than memory: streamed layers against the disk.

python -P -m labkit.bench.streaming [--model opt-1.3b] [--turns 4] [--scratch FOLDER] [--output FOLDER]
python -P -m labkit.bench.streaming --model gpt-neox-20b --only bfloat16 --turns 1 --rounds 1 --subject larger

Each case is an engine in its own process. The cases take turns in random order, and the disk is probed before and after
every prompt and every run of decode steps. The runs are whole generations, because the bench also counts the reads and
the hidden work of steps that follow each other without a pause; `labkit plan-batch --measure` has turns of a few steps.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from labkit.bench.bars import SHARE, BarCheck, at_least, at_most
from labkit.bench.page import (
    BenchFiles,
    Output,
    Threads,
    cell,
    checks_table,
    err,
    machine_of,
    markdown_table,
    page_of,
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
from labkit.engine.team_size import team_size
from labkit.harness.environment import Environment, read_environment
from labkit.harness.rounds import random_orders
from labkit.harness.stream_record import StreamMeasurement
from labkit.statistics import ratio
from labkit.system.child import run_child
from labkit.system.command import run_command
from labkit.system.errors import UserError
from labkit.system.progress import progress_bar
from labkit.weights.precision import precision_of
from labkit.weights.resolve import resolve
from labkit.weights.spec import WeightSpec

WORKER = "labkit.bench.stream_worker"
SLOTS = 3
PROMPT_NEW = 3  # new tokens after a long prompt: its decode steps are like the steps of other cases


def main(
    model: Annotated[str, typer.Option(help="A preset or folder.")] = STREAM_MODEL,
    only: Annotated[list[str] | None, typer.Option(help="A case; may be repeated.")] = None,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each case, interleaved.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Prompts, each with its decode steps, in a turn.")] = 2,
    new: Annotated[int, typer.Option(min=3, help="Tokens of a round.")] = 9,
    scratch: Annotated[Path | None, typer.Option(help="Folder on the disk to measure.")] = None,
    subject: Annotated[str, typer.Option(help="End of the files' names.")] = "streaming",
    threads: Threads = None,
    output: Output = None,
) -> None:
    """Measure how fast this machine streams a model."""
    targets = [target for target in STREAM_TARGETS if not only or target.name in only]
    if not targets:
        raise UserError(f"got --only {only}, expected some of {', '.join(target.name for target in STREAM_TARGETS)}")
    environment = read_environment(threads or team_size())
    files = BenchFiles.of(machine_of(environment), subject, output=output)
    with tempfile.TemporaryDirectory(dir=scratch or files.records.parent) as folder:
        measurements = measure(model, targets, Path(folder), turns, rounds, new, environment)
    files.finish(measurements, page(measurements), checks(measurements))


def measure(
    model: str,
    targets: Sequence[StreamTarget],
    folder: Path,
    turns: int,
    rounds: int,
    new: int,
    environment: Environment,
) -> list[StreamMeasurement]:
    """Runs the cases in turns. Packed weights stay in `folder`, so only the first turn packs."""
    lines: list[list[dict[str, Any]]] = [[] for _ in targets]
    orders = random_orders(len(targets))
    with progress_bar(err) as follow:
        for turn in range(turns):
            for number, index in enumerate(next(orders)):
                target = targets[index]
                follow(turn * len(targets) + number, turns * len(targets), f"turn {turn + 1}: {target.name}")
                steps = min(new, PROMPT_NEW) if target.prompt > 1000 else new
                options = ("--rounds", rounds, "--new", steps, "--prompt", target.prompt, "--slots", SLOTS)
                command = [sys.executable, "-P", "-m", WORKER, model, target.precision, folder, *options]
                command += ["--resident-gb", resident_gb(model, target), "--threads", environment.threads]
                lines[index].append(json.loads(run_child([str(part) for part in command], f"{target.name} failed")))
    return [merged(model, target, of_turns, environment) for target, of_turns in zip(targets, lines, strict=True)]


def resident_gb(model: str, target: StreamTarget) -> float:
    """Memory for the resident layers, the slots, and the weights outside the layers."""
    options = Options(**precision_of(target.precision).options)
    assert options.dtype is not None
    footprint = Footprint.of(WeightSpec.of(resolve(model).hf_config, options.dtype, quant=options.quant))
    return (footprint.outside + (SLOTS + target.resident * footprint.layers) * footprint.layer) / 1e9


def merged(
    model: str, target: StreamTarget, turns: Sequence[dict[str, Any]], environment: Environment
) -> StreamMeasurement:
    """The record of a case: the common fields of its turns, the rounds of all turns, and the highest peak."""
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
            "rounds": [stream_round for turn in turns for stream_round in turn["rounds"]],
        }
    )


def checks(measurements: Sequence[StreamMeasurement]) -> Iterator[BarCheck]:
    """The checks of streaming, for the cases that were measured."""
    for case in measurements:
        if case.prompt_tokens > 1000:
            yield from _hidden(case, "prompt")
            yield at_most(f"{case.name}: reads of a layer", round(case.reads_per_step, 1), 1.0)
        elif case.streamed_layers == case.layers:
            yield at_least(f"{case.name}: share of the disk", case.disk_share(), STREAM_SHARE, SHARE)
            yield from _hidden(case, "decode")
        else:
            figure = f"{case.name}: step without unhidden computing / disk"
            yield at_most(figure, case.beside_floor(), STREAM_BESIDE)
    by_name = {case.name: case for case in measurements}
    for (slow, fast), bar in STREAM_RATIOS.items():
        if slow in by_name and fast in by_name:
            times = (by_name[slow].step_ms(), by_name[fast].step_ms())
            yield at_least(f"{slow} / {fast}", ratio(*times), bar)


def _hidden(case: StreamMeasurement, phase: Literal["prompt", "decode"]) -> Iterator[BarCheck]:
    """The check of the hidden share, if there was time to hide."""
    if (share := case.hidden(phase)) is not None:
        yield at_least(f"{case.name}: hidden of the shorter", share, STREAM_HIDDEN, SHARE)


def page(measurements: Sequence[StreamMeasurement]) -> str:
    """The Markdown page of the records."""
    first = measurements[0]
    return page_of(
        f"Streaming {first.model} on {first.environment.machine}",
        f"{first.model}, whose layers are read from a file for every step, past the page cache, into {first.slots} "
        f"slots; each case in its own process, in turns, {len(first.rounds)} rounds. The disk is probed before and "
        "after each prompt and each run of decode steps; its time is the bytes of a step / the mean of the two probes.",
        verdict([("streaming", check) for check in checks(measurements)]),
        markdown_table(
            ("case", "GB a step", "in memory", "prompt", "disk, GB/s", "step, ms", "of the disk", "hidden", "peak, GB"),
            [_row(case) for case in measurements],
        ),
        "In memory: weights and slots. Hidden: share of the shorter of reading and computing, in the prompt / in "
        "decode steps. Peak: of the process, without its imports.",
        checks_table(checks(measurements)),
        first.environment.origin,
    )


def _row(case: StreamMeasurement) -> tuple[str, ...]:
    rates = sorted(rate for stream_round in case.rounds for rate in stream_round.disk_gb_s)
    steps, share = sorted(case.step_ms()), case.disk_share()
    hidden = (case.hidden("prompt"), case.hidden("decode"))
    return (
        case.name,
        f"{case.streamed_bytes / 1e9:.2f} of {case.file_bytes / 1e9:.2f}",
        f"{case.resident_bytes / 1e9:.2f} GB",
        f"{case.prompt_tokens}",
        f"{rates[0]:.2f} to {rates[-1]:.2f}",
        f"{steps[len(steps) // 2]:.0f}",
        f"{share.value:.0%} [{share.low:.0%}, {share.high:.0%}]",
        " / ".join(cell(part, "{:.0%}") for part in hidden),
        f"{case.peak_bytes / 1e9:.2f}",
    )


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
