"""Tables of results fit into a terminal."""

import io

import pytest
from rich.console import Console

from labkit.system.result_table import ResultTable

WORDS = ("prefill", "attention", "no stage")
NUMBERS = ("16,879.0", "96.3%", "1,234.567")
TABLE = ResultTable(
    title="",
    columns=("phase", "stage", *("ms a step",) * 7),
    rows=tuple(("prefill", WORDS[number % 3], *(NUMBERS * 3)[:7]) for number in range(6)),
    notes=("a note",),
    names=2,
)


def shown(table: ResultTable, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as captured:
        console.print(table)
    return captured.get().splitlines()


@pytest.mark.parametrize("width", [80, 100, 200])
def test_no_cell_is_cut(width: int) -> None:
    """At 80 columns the cells leave no room for lines between them."""
    lines = shown(TABLE, width)
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines)
    for text in (*WORDS, *NUMBERS):
        assert text in "".join(lines)
    assert ("┃" in "".join(lines)) == (width > 80)
    assert lines[-1].strip() == "a note"
