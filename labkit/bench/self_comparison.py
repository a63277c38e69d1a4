"""What comparisons say where there is nothing to find: a side is compared with itself, many times.

python -P -m labkit.bench.self_comparison [--model gpt2] [--dtype bfloat16,float32] [--side fused] [--runs 50]
[--against COMMIT]

It is no part of `make bench`, since a hundred comparisons take two hours. The files are rewritten after each of them. A
stopped bench goes on where it was: comparisons of the same day, machine, commit and settings count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from statistics import median
from typing import Annotated

import numpy as np
import typer
from rich.markup import escape

from labkit.bench.bars import POINTS, SHARE, BarCheck, BarUnit, at_least, at_most
from labkit.bench.page import (
    BenchFiles,
    Output,
    Threads,
    checks_table,
    followed,
    machine_of,
    out,
    page_of,
    stop_if_interrupted,
)
from labkit.engine.team_size import team_size
from labkit.harness.compare.compare import BUDGET_S, compare
from labkit.harness.environment import read_environment
from labkit.harness.self_comparison_record import SelfComparison
from labkit.statistics import Verdict
from labkit.system.comma_list import listed
from labkit.system.command import run_command

DECIDED = (Verdict.FASTER, Verdict.SLOWER)
WIDTH = BarUnit("{:.1%}", "{:.0%}")
FOUND = ((1.05, BUDGET_S, 0.90), (1.10, BUDGET_S / 2, 0.99))  # factor of one side's time, seconds, bar of the share


def main(
    model: Annotated[str, typer.Option(help="A preset, a checkpoint folder or a GGUF file.")] = "gpt2",
    dtype: Annotated[str, typer.Option(help="Precisions, separated by commas; they take turns.")] = "bfloat16,float32",
    side: Annotated[str, typer.Option(help="The side; labkit sides lists them.")] = "fused",
    runs: Annotated[int, typer.Option(min=2, help="Comparisons of each precision.")] = 50,
    against: Annotated[str | None, typer.Option(help="Another version of labkit, such as HEAD.")] = None,
    threads: Threads = None,
    output: Output = None,
) -> None:
    """Compare a side with itself."""
    threads = threads or team_size()
    environment = read_environment(threads)
    subject = "self-comparison" + ("-against" if against else "")
    files = BenchFiles.of(machine_of(environment), subject, output=output)
    records = files.kept(SelfComparison)

    def done(precision: str) -> int:
        key = (environment.commit, model, precision, side, against, threads)
        return sum(_key(record) == key for record in records)

    for number in range(1, runs + 1):
        for precision in listed(dtype):
            if done(precision) >= number:
                continue
            with followed(f"{model}, {precision}, {number} of {runs}") as follow:
                comparison = compare(
                    None if against else side,
                    side,
                    model=model,
                    dtype=precision,
                    against=against,
                    threads=threads,
                    budget_s=BUDGET_S,
                    output=None,
                    progress=follow,
                )
            stop_if_interrupted([comparison])
            records.append(SelfComparison.of(comparison, version=against))
            files.write(records, page(records))
            ways = " and ".join(side.reading or "unknown" for side in (comparison.baseline, comparison.candidate))
            out.print(f"{model}, {precision}: {escape(comparison.claim())}; read with {ways}", soft_wrap=True)
    files.name_page()


def checks(records: Iterable[SelfComparison]) -> Iterator[BarCheck]:
    """The bars of comparisons of one case."""
    records = list(records)
    count, verdicts = len(records), Counter(record.verdict for record in records)
    yield at_most("FASTER or SLOWER", sum(verdicts[said] for said in DECIDED) / count, 0.02, SHARE)
    yield at_least("SAME", verdicts[Verdict.SAME] / count, 0.85, SHARE)
    middle = float(np.exp(np.mean([np.log(record.ratio.value) for record in records])))
    held = sum(record.ratio.low <= middle <= record.ratio.high for record in records)
    yield at_least("intervals that hold the mean of all", held / count, 0.90, SHARE)
    yield at_most("width of an interval, median", median(map(_width, records)), 0.04, WIDTH)
    for factor, seconds, bar in FOUND:
        after_s = [record.found_after_s(ratio) for record in records for ratio in (factor, 1 / factor)]
        found = sum(second is not None and second <= seconds for second in after_s)
        what = f"a side {factor - 1:.0%} slower, found within {seconds:.0f} s"
        yield at_least(what, found / len(after_s), bar, SHARE)
    shares = [share for record in records for share in record.shares if share is not None]
    if len(shares) > 1:
        yield at_most("share of the limit, standard deviation", 100 * float(np.std(shares, ddof=1)), 2, POINTS)


def page(records: Iterable[SelfComparison]) -> str:
    """The Markdown page of the comparisons, with a part for each case."""
    cases: dict[tuple[str, str, str], list[SelfComparison]] = {}
    for record in records:
        title = f"{record.case.title}, {record.case.threads} thread{'' if record.case.threads == 1 else 's'}"
        cases.setdefault((record.side, record.against, title), []).append(record)
    environment = next(iter(cases.values()))[0].environment
    blocks = []
    for (side, against, title), of_case in cases.items():
        verdicts = Counter(record.verdict for record in of_case)
        said = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
        epochs = [len(record.logs) for record in of_case]
        seconds = [record.ends_s[-1] for record in of_case]
        blocks += [
            f"## {side} against {against}: {title}",
            f"{len(of_case)} comparisons: {said}. {min(epochs)} to {max(epochs)} epochs, {min(seconds):.0f} to "
            f"{max(seconds):.0f} s without loading.",
            checks_table(checks(of_case)),
        ]
    return page_of(
        f"A side against itself on {environment.machine}",
        "Each comparison is one of `labkit compare` with its defaults: both sides take turns of a few tokens, in "
        "epochs with weights in new memory if the side can move them, until the rule decides or a minute is spent. A "
        "slower side is computed: "
        "the rule looks at the measured epochs with every ratio multiplied, once in favour of each side.",
        *blocks,
        environment.origin,
    )


def _key(record: SelfComparison) -> tuple[str | None, str, str, str, str | None, int]:
    """What two comparisons share if the settings of the bench were the same."""
    case = record.case
    return record.environment.commit, case.model, case.dtype, record.side, record.version, case.threads


def _width(record: SelfComparison) -> float:
    return record.ratio.high / record.ratio.low - 1


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
