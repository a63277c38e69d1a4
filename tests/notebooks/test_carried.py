"""The notebooks that come with labkit are found by name, and a file of the user comes first."""

import re
import shutil
from pathlib import Path

import pytest

from labkit.notebooks import NotebookError
from labkit.notebooks.carried import carried_notebooks, find_notebook, title

FIRST = "01_vanilla_vs_fused"


def test_each_has_a_name_of_its_own_and_a_question() -> None:
    known = carried_notebooks()
    assert FIRST in known
    assert all(title(path) for path in known.values())
    for name, path in known.items():
        assert find_notebook(name) == find_notebook(path) == path


@pytest.mark.parametrize("name", [FIRST, f"{FIRST}.ipynb"])
def test_a_file_in_the_current_folder_comes_before_the_one_that_labkit_brings(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_notebook(name) == carried_notebooks()[FIRST]
    shutil.copy(carried_notebooks()[FIRST], tmp_path)
    assert find_notebook(name).resolve() == tmp_path / f"{FIRST}.ipynb"


def test_a_mistyped_name_gets_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotebookError, match=re.escape(f"no notebook at 01_vanila (did you mean '{FIRST}'")) as error:
        find_notebook("01_vanila")
    assert all(name in str(error.value) for name in carried_notebooks())
