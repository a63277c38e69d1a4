"""`make bench`, the part of tensor parallelism: two ranks against one and two threads, held against the memory.

python -P -m labkit.bench.parallel [--quick] [--output FOLDER]

More ranks gain what more read bandwidth gains, no more: so the bar of two ranks against one thread is a share of what
the memory gives two threads over one, both probed beside the runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from labkit.bench.models import stem
from labkit.bench.report import markdown_table
from labkit.bench.targets import Check, tokens
from labkit.harness.compare.interleave import SideSpec, take_turns
from labkit.harness.environment import read_environment
from labkit.harness.exchange.measure import CALLS, KB, measure_exchange
from labkit.harness.exchange.measure import ROUNDS as EXCHANGE_ROUNDS
from labkit.harness.exchange.records import WAYS, ExchangeMeasurement, exchange_remarks
from labkit.harness.exchange.table import kilobytes, microseconds
from labkit.harness.records import Comparison, Measurement
from labkit.system.command import run_command
from labkit.system.progress import progress_bar
from labkit.system.whole_file import write_whole

MODELS = ("llama-shape", "gpt2-medium")
PROMPT, NEW, ROUNDS, WARM_UP = 128, 64, 7, 16
QUICK_NEW, QUICK_ROUNDS, QUICK_CALLS = 8, 2, 10
ONE, TWO = SideSpec("fused", 1), SideSpec("fused", 2)
BASELINES = (SideSpec("hf-eager", 2), ONE, TWO)
CUT = SideSpec("fused", 1, ranks=2)
OF_LIMIT = 0.9  # (one thread / two ranks) / what the memory allows, at least
TO_TWO_THREADS = 1.05  # two ranks / two threads, at most
EXCHANGE_US, EXCHANGE_RATIO = 10.0, 5.0  # of a sum of these sizes: at most, and times faster than gloo, at least
EXCHANGE_SIZES = range(4 * KB, 16 * KB + 1)

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def main(
    quick: Annotated[
        bool, typer.Option("--quick", help="Few tokens and rounds: whether it works, not how fast it is.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Folder; profiles, or runs with --quick.")] = None,
    rounds: Annotated[int, typer.Option(min=2, help="Runs of each side, interleaved.")] = ROUNDS,
) -> None:
    """Measure tensor parallelism on this machine."""
    environment = read_environment(CUT.cores)
    file = (output or Path("runs" if quick else "profiles")) / f"{stem(environment, quick=quick)}-parallel.jsonl"
    with progress_bar(err) as follow:
        sums = measure_exchange(
            CUT.ranks,
            rounds=QUICK_ROUNDS if quick else EXCHANGE_ROUNDS,
            calls=QUICK_CALLS if quick else CALLS,
            progress=lambda done, total, label: follow(done, total, f"sums: {label}"),
        )
    found: list[Comparison] = []
    for model in MODELS:
        with progress_bar(err) as follow:
            turns = take_turns(
                (*BASELINES, CUT),
                model=model,
                prompt=PROMPT,
                new=QUICK_NEW if quick else NEW,
                rounds=QUICK_ROUNDS if quick else rounds,
                warm_up=QUICK_NEW if quick else WARM_UP,
                output=None,
                progress=lambda done, total, label, model=model: follow(done, total, f"{model}: {label}"),  # type: ignore[misc]
            )
        mine = [turns.comparison(which, -1) for which in range(len(BASELINES))]
        out.print(f"{model}: {'; '.join(f'{check.what}: {check.figure}' for check in checks(mine))}", soft_wrap=True)
        found += mine
    write_whole(file, "".join(record.model_dump_json() + "\n" for record in (*sums, *found)))
    write_whole(file.with_suffix(".md"), page(sums, found))
    out.print(str(file.with_suffix(".md")), soft_wrap=True)


def checks(found: Sequence[Comparison]) -> Iterator[Check]:
    """The bars of one model, from its comparisons with `BASELINES`, in their order."""
    _, one, two = found
    ratio, limit = one.ratio("per_token"), one.limit_ratio
    if limit is not None:
        bar = OF_LIMIT * limit
        met, close = ratio.value >= bar, ratio.low < bar <= ratio.high
        allowed = f"≥ {OF_LIMIT} of the {limit:.2f}x that the memory allows"
        yield Check("one thread / two ranks", str(ratio), allowed, met, close=close)
    ratio, bar = two.ratio("per_token"), 1 / TO_TWO_THREADS
    met, close = ratio.value >= bar, ratio.low < bar <= ratio.high
    yield Check("two threads / two ranks", str(ratio), f"≥ 1 / {TO_TWO_THREADS}", met, close=close)
    equal = all(comparison.tokens_equal for comparison in found)
    yield Check("tokens", "equal" if equal else "; ".join(map(tokens, found)), "equal", equal)


def exchange_checks(rows: Sequence[ExchangeMeasurement]) -> Iterator[Check]:
    """The bars of the sums of a decode step's size."""
    for row in rows:
        if row.bytes in EXCHANGE_SIZES:
            took, ratio, what = row.median_us(), row.ratio(), f"a sum of {kilobytes(row)} KB"
            yield Check(what, f"{took:.1f} µs", f"≤ {EXCHANGE_US:.0f} µs", took <= EXCHANGE_US)
            close = ratio.low < EXCHANGE_RATIO <= ratio.high
            met = ratio.value >= EXCHANGE_RATIO
            yield Check(f"{what}, gloo / shared memory", str(ratio), f"≥ {EXCHANGE_RATIO:.0f}x", met, close=close)


def page(sums: Sequence[ExchangeMeasurement], found: Sequence[Comparison]) -> str:
    """The Markdown page of a bench: `found` holds each model's comparisons with `BASELINES`, in their order."""
    models = [found[begin : begin + len(BASELINES)] for begin in range(0, len(found), len(BASELINES))]
    judged = [(first.case.model, check) for first, *rest in models for check in checks([first, *rest])]
    judged += [("the exchange", check) for check in exchange_checks(sums)]
    missed = [f"- {name}, {check.what}: {check.figure} ({check})" for name, check in judged if not check.met]
    case, environment = found[0].case, found[0].candidate.environment
    remarks = [f"{record.case.model}: {remark}" for record in found for remark in record.remarks]
    lines = [
        f"# Tensor parallelism on {environment.machine}",
        "",
        f"{case.dtype}, batch {case.batch}, prompt {case.prompt_tokens}, {case.new_tokens} new greedy tokens; "
        f"{len(found[0].candidate.runs)} rounds, one run of every side in each, in random order. The two ranks are "
        "processes of one thread on a core each, and exchange their sums through shared memory. The limit of a side is "
        "reading its bytes at the bandwidth probed with all of its threads beside its runs. What two ranks can gain "
        "over one thread is what the memory gives two threads over one.",
        "",
        f"**{sum(check.met for _, check in judged)} of {len(judged)} bars met.** Missed:",
        "",
        *(missed or ["- none"]),
    ]
    for comparisons in models:
        lines += ["", f"## {comparisons[0].case.model}", "", _sides_table(comparisons), "", _checks_table(comparisons)]
        waits = ", ".join(f"{share:.1%}" for share in comparisons[0].candidate.communication_shares)
        lines += ["", f"The ranks wait for each other in {waits} of a decode step."]
    lines += ["", "## Sums over two ranks, µs per call: median (P95)", "", _sums_table(sums), "", "## Remarks", ""]
    lines += [f"- {remark}" for remark in dict.fromkeys([*exchange_remarks(sums), *remarks])] or ["None."]
    lines += ["", environment.origin, ""]
    return "\n".join(lines)


def _sides_table(comparisons: Sequence[Comparison]) -> str:
    sides = [*(comparison.baseline for comparison in comparisons), comparisons[0].candidate]
    header = (
        *("side", "per token, ms", "first token, ms", "of the limit", "GB/s read"),
        *("load, s", "start to ready, s", "peak memory, MB (of the largest rank)"),
    )
    return markdown_table(header, map(_cells, sides))


def _cells(side: Measurement) -> list[str]:
    figures: list[tuple[float | None, str]] = [
        (side.per_token_ms, ".2f"),
        (side.ttft_ms, ".1f"),
        (side.floor_share, ".0%"),
        (side.read_bandwidth_gb_s, ".1f"),
        (side.load_s, ".1f"),
        (side.start_to_ready_s, ".1f"),
        (side.peak_rss_mb, ",.0f"),
    ]
    return [side.name, *("unknown" if value is None else f"{value:{unit}}" for value, unit in figures)]


def _checks_table(comparisons: Sequence[Comparison]) -> str:
    return markdown_table(
        ("bar", "measured", ""), ((check.what, check.figure, str(check)) for check in checks(comparisons))
    )


def _sums_table(rows: Sequence[ExchangeMeasurement]) -> str:
    shared, gloo = WAYS.values()
    return markdown_table(
        ("KB", shared, gloo, f"{gloo} / {shared}"),
        ([kilobytes(row), *(microseconds(row, impl) for impl in WAYS), str(row.ratio())] for row in rows),
    )


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
