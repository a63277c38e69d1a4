"""What the tables of a bench say, from cells with known figures."""

import pandas as pd
import pytest
from comparisons import environment, measurement

from labkit.harness.methods.cell import MethodCell
from labkit.harness.methods.grid import MethodGrid
from labkit.published import published


def cell(method: str, batch: int, *, model: str = "gpt2", oom: str = "", refused: str = "") -> MethodCell:
    found = measurement("fused", new_tokens=32)
    case = found.case.model_copy(update={"batch": batch, "model": model, "memory_gb": 2.0})
    measured = None if oom or refused else found.model_copy(update={"case": case, "memory_limit": "a memory cgroup"})
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
    one, four = GRID.cells[:2]
    assert one.measured is not None
    step_ms = one.measured.end_to_end_ms / 32
    assert one.step_ms == one.token_ms == four.step_ms == pytest.approx(step_ms)
    assert four.token_ms == pytest.approx(step_ms / 4)
    assert four.tokens_per_s == pytest.approx(4000 / step_ms)


def test_there_is_a_row_for_each_method_and_a_column_for_each_batch() -> None:
    table = GRID.table()
    assert table.columns == ("method, at batch", "1", "4")
    figures = tuple(f"{each.token_ms:.2f}" for each in GRID.cells[:2])
    assert table.rows == (("fused", *figures), ("hf-eager", figures[0], "oom"), ("llama.cpp", "–", "–"))
    assert "hf-eager, batch 4: needs more" in table.notes
    assert any(note.startswith("llama.cpp, batch 1, 4: one") for note in table.notes)
    assert any("2 GB of memory for each method" in note for note in table.notes)


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
    assert page.startswith("# Ways to run gpt2\n")
    assert page.count("\n## ") == 3
    lines = [line for line in page.splitlines() if line.startswith("| hf-eager | ")]
    assert lines[0].endswith("| oom |")
    frame = GRID.to_frame()
    assert list(frame["outcome"]) == ["measured", "measured", "measured", "oom", "refused", "refused"]
    assert pd.isna(frame["token_ms"].iloc[3])
