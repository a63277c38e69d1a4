"""`make bench`, the part about tensor parallelism: two ranks against one thread and against two.

python -P -m labkit.bench.parallel [--quick] [--output FOLDER]

The memory limits the gain of more ranks. So the bar of two ranks against one thread is a share of the ratio of read
bandwidths, two threads / one thread, both probed in each pair of turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import typer

from labkit.bench.bars import US, BarCheck, at_least, at_most
from labkit.bench.page import (
    BenchFiles,
    EpochCount,
    Output,
    Quick,
    checks_table,
    followed,
    machine_of,
    markdown_table,
    out,
    page_of,
    stop_if_interrupted,
    verdict,
    way_of,
)
from labkit.bench.report import tokens
from labkit.bench.targets import EXCHANGE_RATIO, EXCHANGE_SIZES, EXCHANGE_US, OF_LIMIT, PARALLEL_MODELS, TO_TWO_THREADS
from labkit.harness.compare.compare import comparison_case
from labkit.harness.compare.interleave import take_turns
from labkit.harness.compare.plan import Schedule, SideSpec
from labkit.harness.comparison import Comparison
from labkit.harness.environment import read_environment
from labkit.harness.exchange.measure import CALLS, measure_exchange
from labkit.harness.exchange.measure import ROUNDS as EXCHANGE_ROUNDS
from labkit.harness.exchange.records import WAYS, ExchangeMeasurement, exchange_remarks
from labkit.harness.exchange.table import kilobytes, microseconds
from labkit.harness.records import Measurement, number_or_unknown
from labkit.system.command import run_command

PROMPT, NEW, ROUNDS, WARM_UP = 128, 64, 6, 16  # rounds: epochs
QUICK_NEW, QUICK_ROUNDS, QUICK_CALLS = 8, 2, 10
ONE, TWO = SideSpec("fused", 1), SideSpec("fused", 2)
BASELINES = (SideSpec("hf-eager", 2), ONE, TWO)
CUT = SideSpec("fused", 1, tp=2)


def main(quick: Quick = False, output: Output = None, rounds: EpochCount = ROUNDS) -> None:
    """Measure tensor parallelism on this machine."""
    environment = read_environment(CUT.cores)
    files = BenchFiles.of(machine_of(environment), "parallel", quick=quick, output=output)
    with followed("sums") as follow:
        sums = measure_exchange(
            CUT.ranks,
            rounds=QUICK_ROUNDS if quick else EXCHANGE_ROUNDS,
            calls=QUICK_CALLS if quick else CALLS,
            progress=follow,
        )
    comparisons: list[Comparison] = []
    for model in PARALLEL_MODELS:
        of_model = _measure(model, QUICK_ROUNDS if quick else rounds, quick=quick)
        stop_if_interrupted(of_model)
        figures = "; ".join(f"{check.what}: {check.figure}" for check in checks(of_model))
        out.print(f"{model}: {figures}", soft_wrap=True)
        comparisons += of_model
    files.finish((*sums, *comparisons), page(sums, comparisons))


def _measure(model: str, rounds: int, *, quick: bool) -> list[Comparison]:
    """The two ranks compared with each of `BASELINES`, all in the same epochs."""
    with followed(model) as follow:
        turns = take_turns(
            (*BASELINES, CUT),
            comparison_case(
                model=model, dtype="float32", batch=1, prompt=PROMPT, new=QUICK_NEW if quick else NEW, threads=1
            ),
            Schedule(rounds=rounds, warm_up=QUICK_NEW if quick else WARM_UP),
            progress=follow,
        )
    return [turns.comparison(baseline, -1) for baseline in range(len(BASELINES))]


def checks(comparisons: Sequence[Comparison]) -> Iterator[BarCheck]:
    """The checks of one model, from its comparisons with `BASELINES`, in their order."""
    _, one_thread, two_threads = comparisons
    if (limit := one_thread.limit_ratio) is not None:
        allowed = f"{OF_LIMIT} of the {limit:.2f}x that the memory allows"
        gained, trusted = one_thread.ratio("per_token"), one_thread.trust().trustworthy
        yield at_least("one thread / two ranks", gained, OF_LIMIT * limit, written=allowed, trusted=trusted)
    allowed = f"1 / {TO_TWO_THREADS}"
    gained, trusted = two_threads.ratio("per_token"), two_threads.trust().trustworthy
    yield at_least("two threads / two ranks", gained, 1 / TO_TWO_THREADS, written=allowed, trusted=trusted)
    equal = all(comparison.tokens_equal for comparison in comparisons)
    yield BarCheck("tokens", "equal" if equal else "; ".join(map(tokens, comparisons)), "equal", equal)


def exchange_checks(rows: Sequence[ExchangeMeasurement]) -> Iterator[BarCheck]:
    """The checks of the sums whose size occurs in a decode step."""
    for row in rows:
        if row.bytes in EXCHANGE_SIZES:
            name = f"a sum of {kilobytes(row)} KB"
            yield at_most(name, row.median_us(), EXCHANGE_US, US)
            yield at_least(f"{name}, gloo / shared memory", row.ratio(), EXCHANGE_RATIO)


def page(sums: Sequence[ExchangeMeasurement], comparisons: Sequence[Comparison]) -> str:
    """The Markdown page of a bench. `comparisons`: each model's comparisons with `BASELINES`, in their order."""
    models = [comparisons[begin : begin + len(BASELINES)] for begin in range(0, len(comparisons), len(BASELINES))]
    judged = [(first.case.model, check) for first, *rest in models for check in checks([first, *rest])]
    judged += [("the exchange", check) for check in exchange_checks(sums)]
    case, environment = comparisons[0].case, comparisons[0].candidate.environment
    remarks = [f"{record.case.model}: {remark}" for record in comparisons for remark in record.remarks]
    return page_of(
        f"Tensor parallelism on {environment.machine}",
        f"{case.dtype}, batch {case.batch}, prompt {case.prompt_tokens}, {case.new_tokens} new greedy tokens; "
        f"{way_of(comparisons)}. The two ranks are processes of one thread on a core each, and exchange their sums "
        "through shared memory. The limit of a side is reading its bytes at the bandwidth of all its threads, probed "
        "next to its turns. Two ranks can gain over one thread at most the ratio of the bandwidths of two threads and "
        "one.",
        verdict(judged),
        *(section for of_model in models for section in _sections(of_model)),
        "## Sums over two ranks, µs per call: median (P95)",
        _sums_table(sums),
        "## Remarks",
        "\n".join(f"- {remark}" for remark in dict.fromkeys([*exchange_remarks(sums), *remarks])) or "None.",
        environment.origin,
    )


def _sections(comparisons: Sequence[Comparison]) -> list[str]:
    """The sections about one model."""
    waits = ", ".join(f"{share:.1%}" for share in comparisons[0].candidate.communication_shares)
    return [
        f"## {comparisons[0].case.model}",
        _sides_table(comparisons),
        checks_table(checks(comparisons)),
        f"The ranks wait for each other in {waits} of a decode step.",
    ]


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
    return [side.name, *(number_or_unknown(value, form) for value, form in figures)]


def _sums_table(rows: Sequence[ExchangeMeasurement]) -> str:
    shared, gloo = WAYS.values()
    return markdown_table(
        ("KB", shared, gloo, f"{gloo} / {shared}"),
        ([kilobytes(row), *(microseconds(row, impl) for impl in WAYS), str(row.ratio())] for row in rows),
    )


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
