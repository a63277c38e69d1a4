"""The rules of the checkout itself: style, types, and lists that have to agree with each other."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
NOTEBOOKS = sorted(ROOT.glob("notebooks/**/*.ipynb"))
CPP = sorted(path for path in ROOT.glob("kernels/**/*") if path.suffix in {".cpp", ".h"})


def check(*command: str | Path, cwd: Path = ROOT) -> None:
    done = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout


def requirements() -> list[Requirement]:
    extras = PROJECT["optional-dependencies"].values()
    return [Requirement(line) for line in [*PROJECT["dependencies"], *(line for extra in extras for line in extra)]]


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def test_ruff_finds_nothing() -> None:
    check(BIN / "ruff", "check")


def test_python_is_formatted() -> None:
    check(BIN / "ruff", "format", "--check")


def test_cpp_is_formatted() -> None:
    assert CPP
    check(BIN / "clang-format", "--dry-run", "-Werror", *CPP)


def test_notebooks_carry_no_outputs() -> None:
    assert NOTEBOOKS
    check(BIN / "nbstripout", "--verify", *NOTEBOOKS)


def test_types_agree(tmp_path: Path) -> None:
    """mypy cannot map kernels/ to labkit.kernels, so it sees the tree as a wheel would lay it out, with a cache of its
    own: it would believe one of the tree as it is.
    """
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "labkit", tmp_path / "labkit", ignore=skip)
    shutil.copytree(ROOT / "kernels", tmp_path / "labkit" / "kernels", ignore=skip)
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=skip)
    config = ("--config-file", ROOT / "pyproject.toml", "--cache-dir", ROOT / ".mypy_cache" / "wheel")
    check(BIN / "mypy", *config, "labkit", "tests", cwd=tmp_path)


def test_package_list_equals_folders() -> None:
    folders = {".".join(init.parent.relative_to(ROOT).parts) for init in (ROOT / "labkit").rglob("__init__.py")}
    folders |= {
        "labkit." + ".".join(init.parent.relative_to(ROOT).parts) for init in ROOT.glob("kernels/**/__init__.py")
    }
    assert sorted(PYPROJECT["tool"]["setuptools"]["packages"]) == sorted(folders)


def test_everything_imported_is_declared_and_everything_declared_is_used() -> None:
    used_unimported = {"ipykernel", "jupyterlab"}  # as the kernel of the notebooks, by make lab
    installed = metadata.packages_distributions()
    sources = [*(ROOT / "labkit").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]
    imported = {module.split(".")[0] for source in sources for module in imports(ast.parse(source.read_text()))}
    imported = {canonicalize_name(installed[module][0]) for module in imported - {"labkit"} if module in installed}
    declared = {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]}
    optional = {canonicalize_name(Requirement(line).name) for line in PROJECT["optional-dependencies"]["accelerate"]}
    assert imported - optional == declared - used_unimported


def test_environment_equals_pyproject() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    *conda, pip = environment["dependencies"]
    extras = ",".join(sorted(PROJECT["optional-dependencies"]))
    assert environment["name"] == PROJECT["name"]
    assert f"python{PROJECT['requires-python']}" in conda
    assert pip["pip"] == ["--constraint constraints.txt", f"--editable .[{extras}]"]


def test_constraints_are_exact() -> None:
    """A local part, as in 2.13.0+cpu, would not install from the ordinary index."""
    exact = re.compile(r"[A-Za-z0-9._-]+==\d+(\.\w+)*")
    assert not [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not exact.fullmatch(line)]


def test_constraints_satisfy_pyproject() -> None:
    pinned = constraints()
    unmet = [str(r) for r in requirements() if not r.specifier.contains(pinned.get(canonicalize_name(r.name), ""))]
    assert not unmet


def test_constraints_cover_everything_installed() -> None:
    """Follows the requirements of the installed packages, so that an unpinned one cannot change under us."""
    pinned, seen, todo = constraints(), set(), requirements()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # torch's CUDA libraries, where torch is the CPU build
            continue
        for extra in {"", *requirement.extras}:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            wanted = [Requirement(line) for line in distribution.requires or ()]
            todo += [r for r in wanted if r.marker is None or r.marker.evaluate({"extra": extra})]
    assert {name for name, _ in seen} <= pinned.keys()
