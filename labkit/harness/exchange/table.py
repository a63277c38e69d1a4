"""The sums over ranks as a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from labkit.harness.exchange.records import WAYS, ExchangeMeasurement, exchange_remarks


def exchange_table(rows: Sequence[ExchangeMeasurement]) -> RenderableType:
    """A row per size: median and 95th percentile of both ways, and the ratio with its interval."""
    first = rows[0]
    table = Table(title=f"a sum over {first.ranks} ranks, µs per call: median (P95)", title_justify="left")
    table.add_column("KB", justify="right")
    for way in WAYS.values():
        table.add_column(way, justify="right")
    table.add_column("{1} / {0}\n[95 %]".format(*WAYS.values()), justify="right")
    for row in rows:
        table.add_row(kilobytes(row), *(microseconds(row, impl) for impl in WAYS), str(row.ratio()))
    rounds = next(iter(first.rounds_us.values()))
    notes = [
        f"{len(rounds)} rounds of {len(rounds[0])} calls from Python; each time is the slowest rank's",
        f"machine: {first.environment.machine}",
        *(f"note: {remark}" for remark in exchange_remarks(rows)),
        *(f"note: {kilobytes(row)} KB: {row.trust.sentence}" for row in rows if not row.trust.trustworthy),
    ]
    return Group(table, Text("\n".join(notes), style="dim"))


def kilobytes(row: ExchangeMeasurement) -> str:
    return f"{row.bytes / 1024:,.4g}"


def microseconds(row: ExchangeMeasurement, impl: str) -> str:
    """Median of the rounds' medians, with the 95th percentile of all calls in brackets."""
    return f"{row.median_us(impl):,.1f} ({row.summary(impl).p95:,.1f})"
