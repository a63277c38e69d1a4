"""Rules for the form of every notebook."""

import re
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
for_each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code(path: Path) -> list[nbformat.NotebookNode]:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


@for_each_notebook
def test_cells_are_few_and_short_and_define_nothing(path: Path) -> None:
    assert len(code(path)) <= 14
    for cell in code(path):
        assert len(cell.source.splitlines()) <= (10 if "parameters" in cell.metadata.get("tags", []) else 8)
        assert not re.search(r"^\s*(def|class)\s", cell.source, re.M)


@for_each_notebook
def test_no_outputs_are_committed(path: Path) -> None:
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code(path))


@for_each_notebook
def test_imports_are_in_one_cell(path: Path) -> None:
    assert sum("import" in cell.source for cell in code(path)) == 1


@for_each_notebook
def test_it_says_what_to_notice_and_ends_with_an_exercise(path: Path) -> None:
    headings = re.findall(r"^## (.*)", "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells), re.M)
    assert "What to notice" in headings
    assert headings[-1].startswith("Exercise")
