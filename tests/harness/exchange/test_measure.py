"""Sums over ranks, timed both ways in the same processes: records, table and refused requests."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from helpers.sweeps import sweep
from rich.console import Console

from labkit.harness import load_records
from labkit.harness.exchange.measure import measure_exchange, save_exchange
from labkit.harness.exchange.records import WAYS, ExchangeMeasurement, exchange_remarks
from labkit.harness.exchange.table import exchange_table

SIZES, ROUNDS, CALLS = (4, 4096), 2, 3
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[ExchangeMeasurement, ...], Path, list[str]]:
    folder, labels = tmp_path_factory.mktemp("runs"), list[str]()
    rows = measure_exchange(
        2,
        sizes=SIZES,
        rounds=ROUNDS,
        calls=CALLS,
        output=folder,
        progress=lambda done, total, label: labels.append(label),
    )
    save_exchange(rows, folder)
    return rows, folder, labels


@sweep
def test_every_call_of_every_way_is_kept(measured: tuple[tuple[ExchangeMeasurement, ...], Path, Any]) -> None:
    rows = measured[0]
    assert [row.bytes for row in rows] == list(SIZES)
    for row in rows:
        assert set(row.rounds_us) == set(WAYS)
        assert [len(calls) for calls in row.rounds_us["cpp"]] == [CALLS] * ROUNDS
        assert all(call > 0 for rounds in row.rounds_us.values() for calls in rounds for call in calls)
        assert row.ratio().value == pytest.approx(row.median_us("reference") / row.median_us("cpp"))


@sweep
def test_ranks_of_one_machine_share_memory(measured: tuple[tuple[ExchangeMeasurement, ...], Path, Any]) -> None:
    assert {row.transport for row in measured[0]} == {"shared memory"}


@sweep
def test_the_records_are_on_disk(measured: tuple[tuple[ExchangeMeasurement, ...], Path, Any]) -> None:
    rows, folder, labels = measured
    assert load_records(folder) == list(rows)
    assert labels[-1] == "done"


@sweep
def test_the_table_shows_both_ways_and_the_ratio(measured: tuple[tuple[ExchangeMeasurement, ...], Path, Any]) -> None:
    rows = measured[0]
    console = Console(width=200, file=StringIO())
    console.print(exchange_table(rows))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for expected in ("shared memory", "gloo", "P95", str(rows[1].ratio())):
        assert expected in text


@sweep
def test_the_figures_are_plain_json(measured: tuple[tuple[ExchangeMeasurement, ...], Path, Any]) -> None:
    figures = measured[0][0].as_dict()
    assert json.loads(json.dumps(figures)) == figures


@sweep
def test_what_weakens_the_figures_is_said(measured: tuple[tuple[ExchangeMeasurement, ...], Path, Any]) -> None:
    quiet = measured[0][0].environment.model_copy(update={"load_average": 0.0})
    row = measured[0][0].model_copy(update={"environment": quiet, "pinned": True})
    assert exchange_remarks([row]) == []
    (fallback, crowded) = exchange_remarks([row.model_copy(update={"transport": "gloo", "pinned": False})])
    assert "share no memory" in fallback
    assert "had no cores of their own" in crowded


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 1}, "got ranks = 1, expected at least 2"),
        ({"rounds": 1}, "got rounds = 1, expected at least 2"),
        ({"sizes": (4096, 6)}, r"got sizes \[6\], expected bytes"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure_exchange(**changes)
