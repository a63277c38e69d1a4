"""A comparison as a table for the terminal. A speedup never stands there without its interval, baseline and grade."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from labkit.harness.comparison import Comparison
from labkit.harness.records import Measurement
from labkit.statistics import Verdict

COLOURS = {Verdict.FASTER: "bold green", Verdict.SLOWER: "bold red", Verdict.SAME: "bold", Verdict.UNDECIDED: "yellow"}


def comparison_table(comparison: Comparison) -> RenderableType:
    """The figures of both sides, the ratios with their intervals, and where all of it comes from."""
    baseline, candidate, case = comparison.baseline, comparison.candidate, comparison.case
    table = Table(
        title=f"{case.model}, {case.dtype}, batch {case.batch}, {case.prompt_tokens} + {case.new_tokens} tokens",
        title_justify="left",
    )
    table.add_column("median of runs")
    table.add_column(baseline.name, justify="right")
    table.add_column(candidate.name, justify="right")
    table.add_column(f"{baseline.name} / {candidate.name}  [{comparison.confidence}]", justify="right")

    def row(name: str, figure: str, unit: str, metric: str = "") -> None:
        values = [_number(getattr(side, figure), unit) for side in (baseline, candidate)]
        table.add_row(name, *values, str(comparison.ratio(metric)) if metric else "")

    row("per token, ms", "per_token_ms", ".2f", "per_token")
    row("first token, ms", "ttft_ms", ".1f", "ttft")
    row("end to end, ms", "end_to_end_ms", ".0f", "end_to_end")
    row("tokens / s", "tokens_per_s", ".1f")
    row("share of the limit", "floor_share", ".0%")
    row("the same of the first token", "prompt_share", ".0%")
    row("peak memory, MB", "peak_rss_mb", ",.0f")

    footer = Text("\n".join(_footer(comparison, baseline, candidate)), style="dim")
    return Group(table, _verdict(comparison), footer)


def _verdict(comparison: Comparison) -> Text:
    """The verdict, or why there is none, and the ratio that it follows from."""
    speed, trust = comparison.ratio("per_token"), comparison.trust()
    against = f"{comparison.candidate.name} against {comparison.baseline.name}: {speed} per token"
    if not trust.trustworthy:
        return Text.assemble(("NOT TRUSTWORTHY", "bold red"), f"  {against}\n{trust.sentence}")
    noise = (
        f"a claim needs more than {1 + speed.noise:.2f}x"
        if comparison.looks
        else f"noise alone reaches {1 + speed.noise:.2f}x"
    )
    return Text.assemble((str(speed.verdict), COLOURS[speed.verdict]), f"  {against}; {noise}")


def _footer(comparison: Comparison, baseline: Measurement, candidate: Measurement) -> list[str]:
    looks = f", looked at after {', '.join(map(str, comparison.looks))}" if comparison.looks else ""
    tokens = "equal" if comparison.tokens_equal else f"DIFFERENT from new token {comparison.first_difference} on"
    bandwidth = comparison.read_bandwidth_gb_s
    limit = f"{bandwidth:.0f} GB/s read, probed beside the runs" if bandwidth else "read bandwidth unknown"
    of_ranks, case = [], comparison.case
    if case.tp > 1:
        waits = ", ".join(f"{share:.0%}" for share in candidate.communication_shares)
        most = f"at most {comparison.limit_ratio:.2f}x by memory" if comparison.limit_ratio else "limit unknown"
        of_ranks.append(
            f"{candidate.name}: {case.tp} ranks, each with {case.threads} thread(s), as many as {baseline.name} has; "
            f"{most}; the ranks wait for each other in {waits} of a decode step"
        )
    reads = [f"{candidate.name} read its weights with {candidate.reading}"] if candidate.reading else []
    limits = [f"the limit was set by {candidate.probe}"] if candidate.probe else []
    answers = [f"{side.name} answers: {side.answer}" for side in (baseline, candidate) if side.answer is not None]
    return [
        *([f"question: {candidate.question}", *answers] if answers else []),
        *of_ranks,
        f"tokens of both sides: {tokens} ({comparison.rounds} rounds{looks})",
        f"weights: {comparison.case.origin}",
        f"{baseline.name}: {baseline.impl}; {candidate.name}: {candidate.impl}",
        f"machine: {candidate.environment.machine}; {limit}",
        *([f"ways to read: {'; '.join(ways)}"] if (ways := reads + limits) else []),
    ]


def _number(value: float | None, unit: str) -> str:
    return "unknown" if value is None else f"{value:{unit}}"
