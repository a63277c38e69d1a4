"""`labkit compare`: a thin layer over `labkit.compare`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

import labkit
from labkit.cli.measuring import AsJson, Dtype, MemoryGb, Model, Output, Threads, WaitQuiet, Width, fraction
from labkit.harness.compare.sides import names_in_help
from labkit.system.progress import progress_bar
from labkit.system.terminal import terminal

if TYPE_CHECKING:
    from labkit.harness import Comparison

out = terminal()
err = terminal(stderr=True)

Ranks = Annotated[
    int, typer.Option(help="Split the candidate over this many ranks, each of --threads threads; not the baseline.")
]
Stages = Annotated[
    int, typer.Option(help="Spread the candidate's layers over this many stages; both sides have the same threads.")
]
Rounds = Annotated[
    int | None, typer.Option(help="A fixed number of epochs, or of rounds; with --budget-s the least number.")
]
Budget = Annotated[
    float | None, typer.Option(help="Measure until there is a verdict, for this long at most; without --rounds 60.")
]
Baseline = Annotated[
    str | None,
    typer.Option(
        help=f"One of the sides that `labkit sides` describes: {names_in_help()} (see `labkit peers`).",
        show_default="hf-eager",
    ),
]
Against = Annotated[
    str | None,
    typer.Option(
        help="Another version of labkit as baseline: a commit, a folder with labkit/ in it, or an environment."
    ),
]
Sample = Annotated[
    str | None,
    typer.Option(help="Sample on both sides, with transformers' settings, such as top_p=0.9,temperature=0.8."),
]


def compare(
    model: Model,
    baseline: Baseline = None,
    candidate: Annotated[str, typer.Option(help="The side that is compared with the baseline.")] = "fused",
    against: Against = None,
    dtype: Dtype = "float32",
    batch: Annotated[int, typer.Option(help="Sequences in a batch.")] = 1,
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 128,
    new: Annotated[int, typer.Option(help="Tokens to generate.")] = 128,
    threads: Threads = None,
    tp: Ranks = 1,
    pp: Stages = 1,
    schedule: Annotated[str, typer.Option(help="Schedule of the stages: queue, rounds, barrier or naive.")] = "queue",
    memory_gb: MemoryGb = None,
    sample: Sample = None,
    rounds: Rounds = None,
    budget_s: Budget = None,
    precision: Width = None,
    seed: Annotated[int, typer.Option(help="Seed of random weights, prompts and the order of the runs.")] = 0,
    question: Annotated[str, typer.Option(help="A question for a chat model: each side answers it once.")] = "",
    wait_quiet: WaitQuiet = None,
    *,
    output: Output,
    as_json: AsJson = False,
) -> None:
    """Measure two ways to run a model, and tell which is faster, with intervals and the machine's limit."""
    from labkit.harness.results import save

    with progress_bar(err) as follow:
        comparison = labkit.compare(
            baseline,
            candidate,
            model=model,
            against=against,
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
            rounds=rounds,
            budget_s=budget_s,
            precision=fraction("precision", precision),
            wait_quiet_s=wait_quiet,
            question=question,
            seed=seed,
            output=output,
            write=False,
            progress=follow,
        )
    _print(comparison, as_json)
    save(comparison, output)  # last, so that the result is shown even if it cannot be saved


def _print(comparison: Comparison, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(comparison.as_dict()))
    else:
        out.print(comparison)
    for remark in comparison.remarks:
        if as_json or remark != comparison.trust().sentence:  # the table ends with this sentence
            err.print(f"note: {escape(remark)}", style="yellow", highlight=False)
