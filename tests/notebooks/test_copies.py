"""Copies of the notebooks follow labkit's own, and changes that a user made in a copy are never lost."""

import shutil
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest

from labkit.notebooks import carried, copies
from labkit.notebooks.carried import carried_notebooks
from labkit.notebooks.copies import copy_notebooks
from labkit.system.errors import UserError

FIRST = "01_vanilla_vs_fused"
Write = Callable[[Path, str], None]


def type_into(path: Path, text: str) -> None:
    """Adds text to the first code cell, as a user types it."""
    notebook = nbformat.read(path, as_version=4)
    next(cell for cell in notebook.cells if cell.cell_type == "code").source += text
    nbformat.write(notebook, path)


def run_in(path: Path, text: str) -> None:
    notebook = nbformat.read(path, as_version=4)
    cell = next(cell for cell in notebook.cells if cell.cell_type == "code")
    cell.outputs = [nbformat.v4.new_output("stream", text=text)]
    nbformat.write(notebook, path)


def save_unchanged(path: Path, name: str) -> None:
    """Saves other metadata of the kernel, as JupyterLab does by itself."""
    notebook = nbformat.read(path, as_version=4)
    notebook.metadata["kernelspec"] = {"name": name, "display_name": name}
    nbformat.write(notebook, path)


def replace_by(path: Path, text: str) -> None:
    path.write_text(text)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A replacement of labkit's own notebooks; a test may change it, as a new version of labkit would."""
    folder = tmp_path / "own"
    shutil.copytree(carried_notebooks()[FIRST].parent, folder, ignore=shutil.ignore_patterns(".*"))
    for module in (carried, copies):
        monkeypatch.setattr(module, "carried", lambda name: folder)
    return folder


def test_copies_are_those_of_labkit_and_a_second_time_nothing_is_written(tmp_path: Path) -> None:
    report = copy_notebooks(tmp_path / "mine")
    assert set(report.written) == carried_notebooks().keys()
    for name, source in carried_notebooks().items():
        assert (tmp_path / "mine" / f"{name}.ipynb").read_bytes() == source.read_bytes()
    again = copy_notebooks(tmp_path / "mine")
    assert again.written == again.changed == again.outdated == ()


@pytest.mark.parametrize("change", [type_into, run_in, replace_by])
def test_a_copy_that_a_person_changed_or_ran_is_kept_whatever_becomes_of_labkits_own(
    change: Write, own: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "mine" / f"{FIRST}.ipynb"
    copy_notebooks(copy.parent)
    change(copy, "mine")
    changed_bytes = copy.read_bytes()
    report = copy_notebooks(copy.parent)
    assert (report.written, report.changed, report.outdated) == ((), (FIRST,), ())
    type_into(own / copy.name, "newer")
    report = copy_notebooks(copy.parent)
    assert (report.written, report.changed, report.outdated) == ((), (FIRST,), (FIRST,))
    assert copy.read_bytes() == changed_bytes
    assert "delete or rename yours to get it" in str(report)


@pytest.mark.parametrize(
    "change",
    [save_unchanged, lambda path, _: path.unlink(), lambda path, _: None],
    ids=["saved", "deleted", "untouched"],
)
def test_a_copy_that_nobody_changed_follows_labkits_own(change: Write, own: Path, tmp_path: Path) -> None:
    copy = tmp_path / "mine" / f"{FIRST}.ipynb"
    copy_notebooks(copy.parent)
    change(copy, "labkit")
    type_into(own / copy.name, "newer")
    assert copy_notebooks(copy.parent).written == (FIRST,)
    assert copy.read_bytes() == (own / copy.name).read_bytes()


def test_a_file_that_was_there_before_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / f"{FIRST}.ipynb").write_text("a person's own")
    report = copy_notebooks(tmp_path)
    assert (tmp_path / f"{FIRST}.ipynb").read_text() == "a person's own"
    assert report.changed == (FIRST,)


def test_labkits_own_folder_is_refused(own: Path) -> None:
    with pytest.raises(UserError, match="holds labkit's own notebooks; name another one"):
        copy_notebooks(own / "workshop")
