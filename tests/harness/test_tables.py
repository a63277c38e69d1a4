"""Results as frames, files and tables: every sample appears once, and no name acts as markup, formula or colour."""

import io
import re
from pathlib import Path

import pandas as pd
import pytest
from helpers.notebooks.pages import Page
from helpers.studies.comparisons import comparison, in_epochs
from IPython.lib.pretty import pretty
from rich import print as rich_print
from rich.console import Console

from labkit.harness import Comparison

HOSTILE = ("<script>alert(1)</script>", "[bold red]x[/]", "=1+1", "a\nb")


def named(name: str) -> Comparison:
    """A comparison whose model and candidate are called `name`."""
    record = comparison(rounds=2)
    case = record.case.model_copy(update={"model": name})
    candidate = record.candidate.model_copy(update={"case": case, "name": name})
    return record.model_copy(update={"candidate": candidate})


def test_a_comparison_has_a_row_for_each_token_of_each_run() -> None:
    record = comparison(rounds=5, new_tokens=7)
    frame = record.to_frame()
    measured = ["side", "impl", "round", "phase", "token", "ms"]
    assert list(frame.columns) == ["role", "machine", *record.case.model_dump(), *measured]
    assert len(frame) == 2 * 5 * 7
    assert not frame.duplicated(["role", "round", "token"]).any()
    assert set(frame["phase"][frame["token"] == 0]) == {"first token"}
    assert set(frame["phase"][frame["token"] > 0]) == {"per token"}


def test_medians_of_the_frame_are_those_of_the_record() -> None:
    record = comparison()
    for role, side in (("baseline", record.baseline), ("candidate", record.candidate)):
        rows = record.to_frame().set_index("role").loc[role]
        runs = rows.groupby(["phase", "round"])["ms"].median().groupby("phase").median()
        assert runs["per token"] == side.per_token_ms
        assert runs["first token"] == side.ttft_ms
        assert rows.groupby("round")["ms"].sum().median() == pytest.approx(side.end_to_end_ms)
        assert rows.reset_index(drop=True).equals(side.to_frame())


def test_a_csv_file_gives_the_frame_back(tmp_path: Path) -> None:
    record = comparison(rounds=3)
    path = record.to_csv(tmp_path / "new" / "samples.csv")
    assert [file.name for file in path.parent.iterdir()] == ["samples.csv"]
    frame = record.to_frame().replace("", None).dropna(axis="columns", how="all")  # a CSV file cannot hold empty texts
    pd.testing.assert_frame_equal(pd.read_csv(path)[list(frame)], frame, check_exact=True)


def test_rounds_have_no_pairs_but_the_same_columns() -> None:
    record = comparison(rounds=3)
    epochs = [[(10.0, 50.0), (11.0, None)]]
    sides = {"baseline": in_epochs(record.baseline, epochs), "candidate": in_epochs(record.candidate, epochs, place=1)}
    assert len(record.pairs_frame()) == 0
    assert list(record.pairs_frame()) == list(record.model_copy(update=sides).pairs_frame())


@pytest.mark.parametrize("name", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", '=HYPERLINK("x")'])
def test_no_text_in_a_csv_file_is_a_formula(name: str, tmp_path: Path) -> None:
    sides = pd.read_csv(named(name).to_csv(tmp_path / "samples.csv"))["side"]
    assert set(sides) == {"hf-eager", f"'{name}"}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_is_no_markup(name: str) -> None:
    record = named(name)
    page = Page(record._repr_html_())
    assert page.scripts == []
    assert all(word in page.text for word in name.split("\n"))
    assert all(word in str(record) for word in name.split("\n"))


def test_in_a_notebook_a_result_has_the_colours_of_the_page() -> None:
    for html in (comparison()._repr_html_(), comparison(rounds=2)._repr_html_(), comparison().candidate._repr_html_()):
        assert not re.search(r"color|background|#[0-9a-f]{3}|<style", html)


def test_terminal_notebook_and_text_say_the_same() -> None:
    record = comparison()
    console = io.StringIO()
    rich_print(record, file=console)
    page = Page(record._repr_html_())
    for text in (console.getvalue(), page.text, str(record), pretty(record)):
        for word in ("FASTER", str(record.ratio("per_token")), "hf-eager", "share of the limit", record.case.origin):
            assert word in text


def test_a_table_fits_a_terminal_of_80_columns() -> None:
    console = Console(width=80)
    with console.capture() as captured:
        console.print(comparison())
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
