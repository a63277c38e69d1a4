"""Folders are kept within bounds of number, size and age."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from labkit.system.kept_folders import DAY_S, Bounds, remove_old, used


def kept(parent: Path, name: str, days: float, size: int = 10) -> Path:
    """Makes a folder with one file, last used `days` days ago."""
    folder = parent / name
    folder.mkdir()
    (folder / "data").write_bytes(b"x" * size)
    last_use = time.time() - days * DAY_S
    os.utime(folder, (last_use, last_use))
    return folder


@pytest.mark.parametrize(
    ("bounds", "remaining"),
    [
        (Bounds(), {"new", "a", "b", "c"}),
        (Bounds(folders=3), {"new", "a", "b"}),
        (Bounds(size_bytes=25), {"new", "a"}),
        (Bounds(size_bytes=5), {"new"}),
        (Bounds(unused_days=2), {"new", "a"}),
    ],
)
def test_what_was_unused_for_the_longest_goes_first(bounds: Bounds, remaining: set[str], tmp_path: Path) -> None:
    for days, name in enumerate("abc", 1):
        kept(tmp_path, name, days)
    (tmp_path / ".writing-x").mkdir()
    (tmp_path / "file").touch()
    remove_old(tmp_path, bounds, keep=kept(tmp_path, "new", 99))
    assert {folder.name for folder in tmp_path.iterdir()} == {*remaining, ".writing-x", "file"}


def test_use_makes_a_folder_new_again(tmp_path: Path) -> None:
    for days, name in enumerate("abc", 1):
        kept(tmp_path, name, days)
    used(tmp_path / "c")
    used(tmp_path / "none")
    remove_old(tmp_path, Bounds(folders=2), keep=kept(tmp_path, "new", 0))
    assert {folder.name for folder in tmp_path.iterdir()} == {"new", "c"}
