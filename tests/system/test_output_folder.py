"""An unusable folder for results is refused before anything is measured; the message names it and a remedy."""

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from labkit.system import output_folder as module
from labkit.system.errors import UserError
from labkit.system.output_folder import COPIES, RUNS, check_output_folder, reason


def test_a_good_folder_is_made_and_left_empty(tmp_path: Path) -> None:
    folder = check_output_folder(tmp_path / "runs" / "today")
    assert folder.is_dir()
    assert list(folder.iterdir()) == []


def raising(code: int) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise OSError(code, os.strerror(code), "somewhere")

    return refuse


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.ENOSPC, "No space left on device; make room there, or name a folder on another disk"),
        (errno.EROFS, "Read-only file system; the file system is read-only; name another folder"),
        (errno.EACCES, "Permission denied; name a folder that you may write to"),
    ],
    ids=["full", "read-only", "forbidden"],
)
def test_a_folder_that_cannot_be_written_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, remedy: str
) -> None:
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", raising(code))
    with pytest.raises(UserError, match=f"cannot be written to the folder .*runs: {remedy}.*the parameter output"):
        check_output_folder(tmp_path / "runs")


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("mine")
    with pytest.raises(UserError, match="there is a file of that name"):
        check_output_folder(tmp_path / "runs")
    with pytest.raises(UserError, match="a part of the path is a file"):
        check_output_folder(tmp_path / "runs" / "today")
    assert (tmp_path / "runs").read_text() == "mine"


def test_a_folder_with_little_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: SimpleNamespace(free=2_000_000))
    with pytest.raises(UserError, match=r"it has 2\.0 MB left, expected 17 MB at least; make room"):
        check_output_folder(tmp_path)


def test_an_error_without_a_known_remedy_keeps_its_words() -> None:
    assert reason(OSError(errno.EIO, "ignored")) == os.strerror(errno.EIO)
    assert reason(OSError("something else")) == "something else"


def test_results_go_to_one_folder_from_the_checkout_and_from_copies_of_the_notebooks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`labkit run` and kernels that start in the folder of the copies, or in a subfolder, write to the same place."""
    copies = tmp_path / "runs" / "notebooks"
    (copies / "workshop").mkdir(parents=True)
    (copies / COPIES).touch()
    for folder in (tmp_path, copies, copies / "workshop"):
        monkeypatch.chdir(folder)
        assert Path(RUNS).resolve() == tmp_path / "runs"


def test_results_of_copies_elsewhere_stay_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / COPIES).touch()
    monkeypatch.chdir(tmp_path / "mine")
    assert Path(RUNS) == tmp_path / "mine" / "runs"
