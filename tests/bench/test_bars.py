"""The verdict on a bar follows from the figure and its interval; file names contain the machine and the day."""

from pathlib import Path

import pytest
from helpers.studies.comparisons import environment

from labkit.bench.bars import MS, SHARE, BarCheck, at_least, at_most
from labkit.bench.page import BenchFiles, machine_of, page_of, verdict
from labkit.statistics import Ratio


def ratio(low: float, value: float, high: float) -> Ratio:
    return Ratio(value, low, high, noise=0.01)


@pytest.mark.parametrize(
    ("figure", "met", "close"),
    [
        (ratio(2.1, 2.2, 2.3), True, False),
        (ratio(1.9, 2.0, 2.1), True, True),
        (ratio(1.8, 1.9, 2.0), False, True),
        (ratio(1.7, 1.8, 1.9), False, False),
        (2.0, True, False),
        (1.99, False, False),
    ],
)
def test_a_figure_on_its_bar_is_met_and_an_interval_around_it_is_close(
    figure: Ratio | float, met: bool, close: bool
) -> None:
    check = at_least("speed", figure, 2.0)
    assert (check.met, check.close) == (met, close)
    assert ("within the interval" in str(check)) == close


@pytest.mark.parametrize(("value", "met"), [(0.99, True), (1.0, True), (1.01, False)])
def test_the_most_that_a_figure_may_be_is_met_by_less(value: float, met: bool) -> None:
    assert at_most("time", value, 1.0, MS).met == met
    assert at_most("time", ratio(0.9, value, 1.1), 1.0).close


def test_figure_and_bar_are_written_in_their_unit() -> None:
    check = at_most("per token", 3.14159, 3.1, MS)
    assert (check.figure, check.bar) == ("3.14 ms", "≤ 3.1 ms")
    assert at_least("share", 0.876, 0.9, SHARE).figure == "88%"
    speedup = ratio(1.234, 2.345, 3.456)
    assert at_least("speed", speedup, 2.0).figure == str(speedup)
    assert at_least("speed", speedup, 2.0, written="what the memory allows").bar == "≥ what the memory allows"


def test_the_verdict_counts_what_is_met_and_names_what_is_missed() -> None:
    met, missed = BarCheck("a", "1", "≥ 1", True), BarCheck("b", "1", "≥ 2", False)
    assert verdict([("one", met)]) == "**1 of 1 bars met**."
    assert verdict([("one", met), ("two", missed)], ", 2 of 3 cases") == (
        "**1 of 2 bars met**, 2 of 3 cases. Missed:\n\n- two, b: 1 (≥ 2: missed)"
    )
    assert page_of("Title", "", "text") == "# Title\n\ntext\n"


def test_a_figure_that_is_not_trustworthy_is_marked_after_its_bar() -> None:
    assert str(at_least("speed", 2.0, 1.5, trusted=False)) == "≥ 1.5x: met, not trustworthy"


def test_a_folder_that_cannot_be_used_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "profiles").write_text("mine")
    with pytest.raises(ValueError, match="cannot be written to the folder"):
        BenchFiles.of("cpu-x", output=tmp_path / "profiles")


def test_files_are_named_by_machine_day_and_subject(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    machine = machine_of(environment())
    assert machine.startswith("cpu-")
    assert machine_of(environment().model_copy(update={"gpu": "NVIDIA H100"})) == "gpu-nvidia-h100"
    files = BenchFiles.of(machine, "regions", quick=True, output=tmp_path / "here")
    assert files.records.match(f"{machine}-????-??-??-quick-regions.jsonl")
    assert BenchFiles.of(machine).records.match(f"profiles/{machine}-????-??-??.jsonl")
    assert BenchFiles.of(machine, quick=True).records.parent == Path("runs")
    files.write([environment()], page_of("Title"))
    assert {path.suffix for path in Path("here").iterdir()} == {".jsonl", ".md"}
    assert files.page.read_text() == "# Title\n"
