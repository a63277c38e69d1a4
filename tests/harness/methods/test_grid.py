"""Tables of a bench of methods, from cells with known figures."""

from collections.abc import Iterator, Sequence
from importlib import import_module

import numpy as np
import pandas as pd
import pytest
from helpers.studies.comparisons import environment, measurement
from scipy.stats import sem, t

from labkit.harness.methods.cell import MethodCell
from labkit.harness.methods.grid import MethodGrid
from labkit.harness.runs import Run, TokenTurn
from labkit.published import published
from labkit.system.result_table import Tabular


def cell(method: str, batch: int, *, model: str = "gpt2", oom: str = "", refused: str = "") -> MethodCell:
    record = measurement("fused", new_tokens=32)
    case = record.case.model_copy(update={"batch": batch, "model": model, "memory_gb": 2.0})
    measured = None if oom or refused else record.model_copy(update={"case": case, "memory_limit": "a memory cgroup"})
    return MethodCell(
        method=method, case=case, cycles=8, seed=0, environment=environment(), measured=measured, oom=oom,
        refused=refused,
    )  # fmt: skip


GRID = MethodGrid(
    (
        cell("fused", 1),
        cell("fused", 4),
        cell("hf-eager", 1),
        cell("hf-eager", 4, oom="needs more"),
        cell("llama.cpp", 1, refused="one | sequence\nonly"),
        cell("llama.cpp", 4, refused="one | sequence\nonly"),
    )
)


def test_a_token_costs_the_time_of_a_call_over_all_new_tokens_and_a_step_over_those_of_a_sequence() -> None:
    batch_1, batch_4 = GRID.cells[:2]
    assert batch_1.measured is not None
    step_ms = batch_1.measured.end_to_end_ms / 32
    assert batch_1.step_ms == batch_1.token_ms == batch_4.step_ms == pytest.approx(step_ms)
    assert batch_4.token_ms == pytest.approx(step_ms / 4)
    assert batch_4.tokens_per_s == pytest.approx(4000 / step_ms)


def figure(cell: MethodCell) -> str:
    """Text of the time of a token with its interval."""
    assert cell.interval is not None
    assert cell.token_ms is not None
    assert cell.interval.low < 1 < cell.interval.high
    return f"{cell.token_ms:.2f} [{cell.token_ms * cell.interval.low:.2f}, {cell.token_ms * cell.interval.high:.2f}]"


def loaded(quiet_cell: MethodCell, others: float, rounds: int) -> MethodCell:
    """The cell with `rounds` rounds, measured while other programs kept `others` processors busy."""
    assert quiet_cell.measured is not None
    runs = tuple(run.model_copy(update={"others_cores": others}) for run in quiet_cell.measured.runs[:rounds])
    return quiet_cell.model_copy(update={"measured": quiet_cell.measured.model_copy(update={"runs": runs})})


@pytest.mark.parametrize(
    ("others", "rounds", "why"),
    [(0.0, 8, ""), (1.9, 8, "other programs used 1.9"), (0.0, 5, "5 rounds, fewer than 6"), (0.0, 1, "1 round, fewer")],
)
def test_a_cell_has_the_grade_of_every_result(others: float, rounds: int, why: str) -> None:
    loaded_cell = loaded(cell("fused", 1), others, rounds)
    grid = MethodGrid((loaded_cell,))
    (text,) = grid.table().rows[0][1:]
    assert text.endswith(" ?") == bool(why)
    assert any(note.startswith(f"?: not trustworthy: {why}") for note in grid.table().notes) == bool(why)
    assert loaded_cell.as_dict()["trustworthy"] == (not why)
    assert why in "; ".join(loaded_cell.as_dict()["distrust"])


def test_only_cells_measured_on_a_quiet_machine_are_final() -> None:
    assert cell("fused", 1).final
    assert cell("fused", 1, oom="needs more").final
    assert not loaded(cell("fused", 1), 1.9, 8).final
    assert not cell("fused", 1, refused="not installed").final


def test_there_is_a_row_for_each_method_and_a_column_for_each_batch() -> None:
    table = GRID.table()
    assert table.columns == ("method, at batch", "1", "4")
    figures = tuple(figure(entry) for entry in GRID.cells[:2])
    assert table.rows == (("fused", *figures), ("hf-eager", figures[0], "oom"), ("llama.cpp", "–", "–"))
    assert "hf-eager, batch 4: needs more" in table.notes
    assert any(note.startswith("llama.cpp, batch 1, 4: one") for note in table.notes)
    assert any("2 GB of memory for each method" in note for note in table.notes)


def in_epochs(of_rounds: MethodCell, calls_ms: Sequence[float], *, placed: bool = True) -> MethodCell:
    """The cell with an epoch for each time of a call."""
    turn = TokenTurn(pair=0, place=0, at_s=0.0, first_step_ms=12.0, step_ms=10.0, bandwidth_gb_s=60.0)
    runs = tuple(
        Run(round=index, ttft_ms=took - 310, decode_ms=(10.0,), end_to_end_ms=took, turns=(turn,), prompts_ms=(90.0,))
        for index, took in enumerate(calls_ms)
    )
    assert of_rounds.measured is not None
    measured = of_rounds.measured.model_copy(update={"runs": runs, "placed_anew": placed})
    return of_rounds.model_copy(update={"measured": measured})


def test_the_interval_of_a_cell_in_epochs_is_that_of_their_centre() -> None:
    entry = in_epochs(cell("fused", 1), (400.0, 404.0, 410.0))
    low, high = t.interval(0.95, 2, np.mean(np.log([400, 404, 410])), sem(np.log([400, 404, 410])))
    assert entry.interval is not None
    assert entry.call_ms is not None
    assert entry.call_ms == pytest.approx((400 * 404 * 410) ** (1 / 3))
    assert entry.call_ms * entry.interval.low == pytest.approx(np.exp(low))
    assert entry.call_ms * entry.interval.high == pytest.approx(np.exp(high))
    assert entry.trust.trustworthy
    (why,) = (doubt.why for doubt in in_epochs(entry, (400.0, 404.0)).trust.doubts if "fewer" in doubt.why)
    assert why == "2 epochs, fewer than 3"
    assert not in_epochs(entry, (400.0, 900.0, 400.0)).trust.trustworthy


def test_the_table_says_how_each_cell_was_measured() -> None:
    limited = cell("fused", 4).model_copy(update={"why_rounds": "with limited memory the files are made cold"})
    grid = MethodGrid(
        (
            in_epochs(cell("fused", 1), (400.0, 404.0, 410.0)),
            limited,
            in_epochs(cell("hf-disk", 1), (400.0,), placed=False),
        )
    )
    first, second, third = grid.table().notes[1:4]
    assert first.startswith("3 epochs of turns of a few tokens, with new memory for the weights between two: ")
    assert first.endswith("(fused, batch 1)")
    assert second == (
        "8 rounds of whole calls, their median: with limited memory the files are made cold (fused, batch 4)"
    )
    assert third.startswith("1 epoch of turns of a few tokens, with the weights in one place, so that another process")
    assert not any("dropped" in note for note in grid.table().notes)
    slept = MethodGrid((limited, limited.model_copy(update={"dropped_pairs": 2})))
    assert "2 pairs of turns were dropped, because the machine slept meanwhile" in slept.table().notes
    assert MethodGrid((cell("fused", 1),)).table().notes[1] == "8 rounds of whole calls, their median"  # older records


def test_the_details_hold_what_was_measured_only() -> None:
    details = GRID.details()
    assert [row[:2] for row in details.rows] == [("fused", "1"), ("fused", "4"), ("hf-eager", "1")]
    assert all(len(row) == len(details.columns) for row in details.rows)
    assert "memory was limited by a memory cgroup" in details.notes


def test_the_published_table_is_the_sources_and_says_so() -> None:
    table = GRID.published()
    assert "published, not measured here" in table.title
    row = next(row for row in table.rows if row[0] == "ds-inference fp16")
    assert row[1:] == ("44.02", "5.7", "3.01", "1.68", "1", "0.69", "oom", "–")
    assert "huggingface.co" in table.notes[0]
    small = MethodGrid((cell("fused", 1, model="bloom-7b1"),)).published()
    values = published("bloom7b1-8xa6000")
    assert small.rows[0][1] == f"{values['value'].iloc[0]:g}"


def test_the_page_holds_all_tables_and_a_frame_all_cells() -> None:
    page = GRID.page()
    assert page.startswith("# Ways to run gpt2: ")
    assert page.count("\n## ") == 3
    lines = [line for line in page.splitlines() if line.startswith("| hf-eager | ")]
    assert lines[0].endswith("| oom |")
    frame = GRID.to_frame()
    assert list(frame["outcome"]) == ["measured", "measured", "measured", "oom", "refused", "refused"]
    assert pd.isna(frame["token_ms"].iloc[3])


def test_every_result_shows_itself_in_one_short_line() -> None:
    """A dataclass would write out all of its samples."""
    assert len(repr(MethodGrid(GRID.cells * 5))) < 200
    for module in ("labkit.harness.diff.changes", "labkit.nsys.analysis.stage_table", "labkit.widgets.benches"):
        import_module(module)
    results = list(subclasses(Tabular))
    assert {"MethodGrid", "RecordsDiff", "StageTable", "ParallelStudy"} <= {result.__name__ for result in results}
    assert [result.__name__ for result in results if result.__repr__ is not Tabular.__repr__] == []


def subclasses(parent: type) -> Iterator[type]:
    children: list[type] = parent.__subclasses__()
    for child in children:
        yield child
        yield from subclasses(child)
