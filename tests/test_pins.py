"""What set-up installs: the pins of constraints.txt agree with each other and with PyTorch's own, on every Python."""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.house.source_tree import ROOT
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = [line.split("  #")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
TRIED = ("3.11.2", "3.11.7", "3.12.1", "3.13.0", "3.14.8")  # docs/install.md: the smallest first
TORCH_OF_PYPI = Path(__file__).with_name("torch_of_pypi.json")  # requirements on PyPI; the CPU build has no Triton
CUDA_LIBRARIES = ("cuda-", "nvidia-")  # PyTorch pins these itself, with other versions for each build


def needs(lines: Iterable[str], python: str, extra: str = "", platform: str = "Linux") -> list[Requirement]:
    """Requirements that apply to a version of Python."""
    environment = {"python_version": python, "platform_system": platform, "extra": extra}
    requirements = [Requirement(line) for line in lines]
    return [item for item in requirements if item.marker is None or item.marker.evaluate(environment)]


def constraints(python: str) -> dict[str, str]:
    return {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in needs(PINS, python)}


def unmet(lines: Iterable[str]) -> list[str]:
    """Requirements that the pins do not meet, on any Python that labkit supports."""
    lines = list(lines)
    return [
        f"Python {python}: {requirement}"
        for python in PYTHONS
        for requirement in needs(lines, python)
        if not requirement.name.startswith(CUDA_LIBRARIES)
        if not requirement.specifier.contains(constraints(python).get(canonicalize_name(requirement.name), ""))
    ]


def direct() -> list[str]:
    extras = PROJECT["optional-dependencies"].values()
    return [*PROJECT["dependencies"], *(line for extra in extras for line in extra)]


def test_every_python_that_is_accepted_is_named() -> None:
    assert PROJECT["requires-python"] == ">=3.11,<3.15"
    assert [line.rsplit(" ")[-1] for line in PROJECT["classifiers"]] == list(PYTHONS)
    assert f"Python {PYTHONS[0]} to {PYTHONS[-1]}" in (ROOT / "README.md").read_text()


def test_every_python_that_was_tried_is_named() -> None:
    """As a user with the CPU build or the CUDA build, or as root: docs/install.md says which."""
    assert {version.rpartition(".")[0] for version in TRIED} == set(PYTHONS)
    install, *others = ((ROOT / page).read_text() for page in ("docs/install.md", "README.md", "pyproject.toml"))
    assert sorted(set(re.findall(r"\b3\.1[1-9]\.\d+", install))) == list(TRIED)
    for text in others:
        assert f"{', '.join(TRIED[:-1])} and {TRIED[-1]}" in text


def test_every_installed_pin_takes_the_smallest_python() -> None:
    """A pin that needs a later one, such as 3.11.4, would end the set-up there."""
    pins = constraints(TRIED[0].rpartition(".")[0])
    required = {
        str(canonicalize_name(package.name)): package.metadata["Requires-Python"]
        for package in metadata.distributions()
        if canonicalize_name(package.name) in pins
    }
    assert len(required) > len(pins) / 2
    assert not {
        name: versions for name, versions in required.items() if versions and TRIED[0] not in SpecifierSet(versions)
    }


def test_environment_equals_pyproject() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    *conda, pip = environment["dependencies"]
    extras = ",".join(sorted(PROJECT["optional-dependencies"]))
    assert environment["name"] == PROJECT["name"]
    assert f"python{PROJECT['requires-python']}" in conda
    assert pip["pip"] == ["--constraint constraints.txt", f"--editable .[{extras}]"]


def test_constraints_are_exact() -> None:
    """A version with a local part, like 2.13.0+cpu, would not install from the ordinary index."""
    exact = re.compile(r'[A-Za-z0-9._-]+==\d+(\.\w+)*(; python_version (<|>=) "3\.\d+")?')
    assert not [line for line in PINS if not exact.fullmatch(line)]


def test_rfc3987_syntax_is_not_installed() -> None:
    """Importing it builds 38 parsers, and jsonschema imports it if it is installed."""
    assert not [python for python in PYTHONS if "rfc3987-syntax" in constraints(python)]


def test_constraints_satisfy_pyproject() -> None:
    assert not unmet(direct())


def test_constraints_satisfy_torch_as_installed_and_as_pypi_has_it() -> None:
    pypi = json.loads(TORCH_OF_PYPI.read_text())
    assert {constraints(python)["torch"] for python in PYTHONS} == {pypi["version"]}
    assert any(line.startswith("triton==") for line in pypi["requires_dist"])
    assert not unmet(pypi["requires_dist"])
    assert not unmet(metadata.distribution("torch").requires or ())


@pytest.mark.sweep
def test_requirements_of_torch_are_still_those_of_pypi(tmp_path: Path) -> None:
    stored = json.loads(TORCH_OF_PYPI.read_text())
    platform = ("--python-version", "3.13", "--platform", "manylinux_2_28_x86_64", "--only-binary", ":all:")
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet"]
    command = [*pip, "--report", "-", *platform, "--target", str(tmp_path), f"torch=={stored['version']}"]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (package,) = json.loads(report)["install"]
    assert package["metadata"]["requires_dist"] == stored["requires_dist"]


def test_constraints_cover_everything_installed() -> None:
    """Follows the requirements of the installed packages, so that no unpinned package can change unnoticed."""
    python = f"3.{sys.version_info.minor}"
    visited, todo = set(), needs(direct(), python)
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if name.startswith(CUDA_LIBRARIES):
            continue
        distribution = metadata.distribution(name)
        for extra in {"", *requirement.extras}:
            if (name, extra) not in visited:
                visited.add((name, extra))
                todo += needs(distribution.requires or (), python, extra)
    assert {name for name, _ in visited} <= constraints(python).keys()
