"""A folder of wheels: whole or not there, with what an installation without a network needs."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.sweeps import sweep

from labkit.notebooks.workshop import wheels
from labkit.notebooks.workshop.wheels import collect_wheels
from labkit.system.errors import RunError, UserError


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project that needs nothing, in place of labkit."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "constraints.txt").write_text("")
    (project / "pyproject.toml").write_text('[project]\nname = "labkit"\nversion = "0"\n')
    (project / "labkit.py").write_text("")
    monkeypatch.setattr(wheels, "_checkout", lambda: project)
    return project


@sweep
def test_the_folder_installs_without_a_network(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a small package in place of the trained model."""
    monkeypatch.setattr(wheels, "TRAINED_MODEL", "six")
    folder = collect_wheels(tmp_path / "stick")
    assert len(list(folder.glob("*.whl"))) == 2
    target = tmp_path / "site"
    offline = ("--no-index", "--find-links", str(folder), "--target", str(target), "--quiet")
    subprocess.run([sys.executable, "-m", "pip", "install", *offline, "labkit", "six"], check=True)
    assert (target / "labkit.py").exists()
    assert (target / "six.py").exists()
    assert "--constraint constraints.txt labkit" in (folder / "README.txt").read_text()


def test_where_pip_fails_nothing_is_left(checkout: Path, tmp_path: Path) -> None:
    (checkout / "pyproject.toml").write_text("[project\n")
    with pytest.raises(RunError, match="pip could not collect the wheels"):
        collect_wheels(tmp_path / "stick")
    assert [path.name for path in tmp_path.iterdir()] == ["project"]


def test_an_interrupt_leaves_nothing(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(folder: Path, *arguments: Any) -> None:
        (folder / "half.whl").write_text("")
        raise KeyboardInterrupt

    monkeypatch.setattr(wheels, "_wheels", interrupted)
    with pytest.raises(KeyboardInterrupt):
        collect_wheels(tmp_path / "stick")
    assert [path.name for path in tmp_path.iterdir()] == ["project"]


def test_an_empty_folder_is_filled_and_one_with_files_is_refused(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheels, "_wheels", lambda folder, *arguments: (folder / "a.whl").write_text(""))
    (tmp_path / "stick").mkdir()
    folder = collect_wheels(tmp_path / "stick")
    assert sorted(path.name for path in folder.iterdir()) == ["README.txt", "a.whl", "constraints.txt"]
    with pytest.raises(UserError, match="has files already; expected a new or an empty folder"):
        collect_wheels(tmp_path / "stick")
    with pytest.raises(UserError, match="has files already"):
        collect_wheels(checkout / "labkit.py")


def test_an_installed_labkit_builds_no_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "site-packages" / "labkit" / "notebooks" / "workshop" / "wheels.py"
    copy.parent.mkdir(parents=True)
    shutil.copyfile(wheels.__file__, copy)
    monkeypatch.setattr(wheels, "__file__", str(copy))
    with pytest.raises(UserError, match="got an installed labkit, expected a checkout"):
        collect_wheels(tmp_path / "stick")
