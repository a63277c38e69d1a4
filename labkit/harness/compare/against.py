"""Another version of labkit, against which the installed one is compared: a commit, a checkout or a Python environment.

A commit or a checkout is copied into a temporary folder, laid out like an installed package, and runs with this Python.
Its kernels are compiled by its own code. The installed labkit is copied, too, if it comes from a checkout, so that
somebody may edit the checkout meanwhile.
"""

from __future__ import annotations

import json
import os
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from labkit.harness.compare.installation import INSTALLED, Installation
from labkit.harness.environment import PACKAGES, commit_of
from labkit.system.asked_from import given
from labkit.system.child import finished
from labkit.system.errors import UserError
from labkit.system.owned_folder import owned_folder

EXPECTED = "expected a commit, a folder with labkit/ in it, or a Python environment with a labkit (bin/python)"
OTHERS = ("PYTHONPATH", "PYTHONHOME", "LABKIT_KERNELS")  # variables that lead to other sources
OF_GIT = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")  # set in hooks
SOURCE = Path(__file__).parents[2] / "__init__.py"  # of the labkit of this process
PREFIX = "labkit-against-"  # of the names of copies
PACKAGE, KERNELS = "labkit", "kernels"  # folders of a checkout
LOOK = f"""
import importlib.util, json
from importlib.metadata import PackageNotFoundError, version

def origin(name):
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        spec = None
    return spec and spec.origin

packages = {{}}
for name in {PACKAGES!r}:
    try:
        packages[name] = version(name)
    except PackageNotFoundError:
        packages[name] = "not installed"
print(json.dumps({{"labkit": origin("labkit"), "kernels": origin("labkit.kernels"), "packages": packages}}))
"""


@contextmanager
def other_version(against: str | os.PathLike[str]) -> Iterator[Installation]:
    """The labkit of a Python environment, of a checkout, or of a commit of the repository of the installed labkit.

    UserError if there is no such version, or if its Python imports another labkit. The copy of a checkout or commit is
    removed at the end.
    """
    named = os.fspath(against)
    if not named:
        raise UserError(f"got {_given(named)}; {EXPECTED}")
    folder = Path(named).expanduser()
    if (folder / "bin" / "python").is_file():
        yield _of_environment(named, folder.absolute())
        return
    with owned_folder(PREFIX) as copy:
        if (folder / PACKAGE / "__init__.py").is_file():
            _copy_checkout(folder, copy)
            commit = commit_of(folder)
            version = f"{folder.resolve().name} ({commit or 'no commit'})"
        else:
            commit = version = _copy_commit(named, copy)
        yield _of_copy(named, copy, version, commit)


@contextmanager
def installed() -> Iterator[Installation]:
    """The labkit of this process. A checkout is copied as it is now, and the copy is removed at the end."""
    root = SOURCE.resolve().parents[1]
    if not (root / KERNELS / "__init__.py").is_file():
        yield replace(INSTALLED, imported=str(SOURCE))
        return
    with owned_folder(PREFIX) as copy:
        _copy_checkout(root, copy)
        yield replace(INSTALLED, environment=_path_to(copy), imported=str(copy / PACKAGE / "__init__.py"))


def _of_environment(named: str, folder: Path) -> Installation:
    """The labkit that is installed in a Python environment."""
    installation = Installation(python=str(folder / "bin" / "python"), without=OTHERS)
    look = _look(named, installation)
    root = Path(look["labkit"]).parents[1]
    if Path(look["labkit"]).samefile(SOURCE) and look["packages"] == _look(named, INSTALLED)["packages"]:
        raise UserError(
            f"got {_given(named)}, which has the same labkit as this process, {root}, and the same packages; {EXPECTED}"
        )
    name = folder.name if not folder.name.startswith(".") else folder.parent.name
    described = {"packages": look["packages"], "commit": commit_of(root)}
    return replace(installation, version=name, imported=look["labkit"], described=described)


def _of_copy(named: str, copy: Path, version: str, commit: str | None) -> Installation:
    """The labkit of a folder that is laid out like an installed package."""
    installation = Installation(environment=_path_to(copy), without=OTHERS, version=version)
    look = _look(named, installation)
    for origin in (look["labkit"], look["kernels"]):
        if origin is None or not Path(origin).resolve().is_relative_to(copy.resolve()):
            raise UserError(
                f"got {_given(named)}, but Python imports {origin} instead of the copy of it in {copy}; install that "
                "version in a Python environment and name its folder"
            )
    return replace(installation, imported=look["labkit"], described={"commit": commit})


def _path_to(copy: Path) -> dict[str, str]:
    """The variable with which Python imports a copy rather than the installed labkit."""
    return {"PYTHONPATH": os.pathsep.join([str(copy), *filter(None, [os.environ.get("PYTHONPATH")])])}


def _copy_checkout(folder: Path, copy: Path) -> None:
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(folder / PACKAGE, copy / PACKAGE, ignore=skip)
    if (folder / KERNELS).is_dir():
        shutil.copytree(folder / KERNELS, copy / PACKAGE / KERNELS, ignore=skip)


def _copy_commit(named: str, copy: Path) -> str:
    """Copies the sources of a commit. Returns its short name."""
    root = SOURCE.resolve().parents[1]
    if shutil.which("git") is None:
        raise UserError(f"got {_given(named)}; {EXPECTED}. A commit needs git, which is not on the PATH")
    top = _git(root, "rev-parse", "--show-toplevel")
    if top.returncode or Path(top.stdout.strip()).resolve() != root:
        raise UserError(
            f"got {_given(named)}; {EXPECTED}. A commit needs a labkit that is installed from a checkout "
            f"(pip install -e), and this one is in {root}"
        )
    commit = _git(root, "rev-parse", "--verify", "--quiet", "--short", "--end-of-options", f"{named}^{{commit}}")
    if commit.returncode:
        raise UserError(f"got {_given(named)}; {EXPECTED}. {root} has no such commit")
    short = commit.stdout.strip()
    archive = copy / "sources.tar"
    done = _git(root, "archive", "--format=tar", f"--output={archive}", short, PACKAGE, KERNELS)
    if done.returncode:
        raise UserError(
            f"got {_given(named)}, a commit without the folders {PACKAGE}/ and {KERNELS}/; name a later one"
        )
    with tarfile.open(archive) as tar:
        tar.extractall(copy, filter="data")
    archive.unlink()
    (copy / KERNELS).rename(copy / PACKAGE / KERNELS)
    return short


def _git(root: Path, *arguments: str) -> CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in OF_GIT}
    return finished(["git", "-C", str(root), *arguments], environment=environment)


def _look(named: str, installation: Installation) -> dict[str, Any]:
    """The files from which an installation imports labkit and its kernels, and the versions of its packages. UserError
    where it has no labkit.
    """
    try:
        done = finished([installation.python, "-P", "-c", LOOK], environment=installation.variables())
    except OSError as error:
        raise UserError(f"got {_given(named)}, whose {installation.python} does not run: {error.strerror}") from None
    if done.returncode:
        raise UserError(f"got {_given(named)}, whose labkit cannot be imported: {done.stderr.strip().splitlines()[-1]}")
    look: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if look["labkit"] is None:
        raise UserError(
            f"got {_given(named)}, whose Python has no labkit; install one there ({installation.python} -m pip "
            "install …), or name a checkout or a commit"
        )
    return look


def _given(named: str) -> str:
    return given("against", named)
