"""Rules of the checkout itself: style, types, and lists that must agree with each other."""

import ast
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from importlib import metadata
from pathlib import Path

import pytest
from helpers.house.source_tree import ROOT, circles, functions, imports, modules, room, tree
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from labkit.harness.compare.peers.table import PEERS

BIN = Path(sys.executable).parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
NOTEBOOKS = sorted(ROOT.glob("notebooks/**/*.ipynb"))
SOURCES = [path for folder in ("labkit", "kernels") for path in sorted((ROOT / folder).rglob("*"))]
CPP = sorted(path for path in ROOT.glob("kernels/**/*") if path.suffix in {".cpp", ".h"})


def check(*command: str | Path, cwd: Path = ROOT) -> None:
    process = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert process.returncode == 0, process.stdout


# Order of imports: a room imports from its own level and from levels above it in this list, never from one below.
ROOMS = (
    ("system",),
    ("stages", "published", "statistics"),
    ("kernels",),
    ("models",),
    ("weights",),
    ("launcher",),
    ("engine",),
    ("harness",),
    ("nsys",),
    ("conversation",),
    ("studies",),
    ("figures",),
    ("widgets",),
    ("notebooks",),
    ("cli",),
    ("bench",),
    ("ops",),
)
NSYS_TAKES_FROM = {"", "nsys", "system", "stages", "published", "statistics"}
IN_A_PROCESS_OF_ITS_OWN = {"labkit.nsys.doctor.inventory"}  # it reports what the kernels would run on

FILE_LINES, FUNCTION_LINES = 350, 60
# Functions that would be harder to read in pieces.
LONG_FOR_A_REASON = {
    "kernels/attention/triton_impl.py: _attend_one": "Triton compiles a kernel from one function",
    "kernels/attention/triton_impl.py: attention": "the launch of that kernel, whose arguments it names one by one",
}


def from_root(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


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
    """mypy cannot map kernels/ to labkit.kernels, so it checks a copy laid out like a wheel. The copy has a cache of
    its own, because mypy would trust the cache of the original tree.
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
    folders |= {"labkit.carried.notebooks", "labkit.carried.profiles.captures"}  # these have no modules
    assert sorted(PYPROJECT["tool"]["setuptools"]["packages"]) == sorted(folders)


def test_everything_imported_is_declared_and_everything_declared_is_used() -> None:
    used_unimported = {"ipykernel"}  # the kernel of the notebooks
    installed = metadata.packages_distributions()
    imported = {item.module.split(".")[0] for module in modules() for item in imports(module)}
    imported = {canonicalize_name(installed[module][0]) for module in imported - {"labkit"} if module in installed}
    declared = {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]}
    lines = [line for extra in ("accelerate", "pictures") for line in PROJECT["optional-dependencies"][extra]]
    # a test of a peer may have imported its packages in this process
    lines += [line for peer in PEERS.values() for line in peer.requirements]
    optional = {canonicalize_name(Requirement(line).name) for line in lines}
    assert imported - optional == declared - used_unimported


def test_the_top_level_holds_no_loose_modules() -> None:
    loose = {path.name for path in (ROOT / "labkit").glob("*.py")}
    assert loose == {"__init__.py", "published.py", "stages.py"}


def test_every_room_has_its_place_in_the_order_of_imports() -> None:
    assert {room(module) for module in modules()} - {""} == {name for level in ROOMS for name in level}


def test_imports_go_in_one_direction() -> None:
    level = {name: number for number, names in enumerate(ROOMS) for name in names}
    upward = [
        f"{module} imports {item.module}"
        for module in modules()
        for item in imports(module)
        if room(module) in level and item.module in modules() and room(item.module) in level
        if level[room(item.module)] > level[room(module)]
    ]
    assert upward == []


def test_nsys_needs_neither_models_nor_engine() -> None:
    imported = {
        (module, item.module)
        for module in modules()
        for item in imports(module)
        if room(module) == "nsys" and item.module in modules() and room(item.module) not in NSYS_TAKES_FROM
    }
    assert {module for module, _ in imported} <= IN_A_PROCESS_OF_ITS_OWN, imported
    assert {room(source) for _, source in imported} <= {"kernels"}, imported


def test_nsys_and_figures_load_no_torch() -> None:
    """Nor does any module that is loaded with them: their imports, and the packages that contain these."""
    todo = [module for module in modules() if room(module) in ("nsys", "figures")]
    visited, foreign = set(todo), set()
    while todo:
        module = todo.pop()
        loaded = {item.module for item in imports(module) if not (item.for_types or item.when_called)}
        loaded |= {module.rpartition(".")[0]} - {""}
        foreign |= {(module, name) for name in loaded if name.split(".")[0] in ("torch", "transformers", "triton")}
        todo += [name for name in loaded - visited if name in modules()]
        visited |= loaded
    assert foreign == set()


def test_no_modules_import_each_other() -> None:
    """Not even for types: what two modules both need belongs in a module of its own."""
    graph = {module: {item.module for item in imports(module)} & modules().keys() for module in modules()}
    assert not circles(graph)


def test_no_file_is_too_long_to_read_in_a_sitting() -> None:
    kinds = {".py", ".cpp", ".h", ".js"}
    sources = [path for path in (*SOURCES, *ROOT.glob("tests/**/*.py")) if path.suffix in kinds]
    long = {from_root(path) for path in sources if len(path.read_text().splitlines()) > FILE_LINES}
    assert not long


def test_the_readme_of_the_helpers_names_each() -> None:
    helpers = ROOT / "tests" / "helpers"
    names = {path.relative_to(helpers).as_posix() for path in helpers.rglob("*.py")}
    lines = (helpers / "README.md").read_text().splitlines()
    assert {line.split("`")[1] for line in lines if line.startswith("| `")} == names
    assert {path.name for path in (ROOT / "tests").glob("*.py") if not path.name.startswith("test_")} == {"conftest.py"}


def test_no_function_is_longer_than_a_screen() -> None:
    """C++ is left out, because a kernel there is one function."""
    sources = [path for path in SOURCES if path.suffix in {".py", ".js"}]
    long = {
        f"{from_root(path)}: {name}" for path in sources for name, lines in functions(path) if lines > FUNCTION_LINES
    }
    assert long == LONG_FOR_A_REASON.keys()


def test_a_class_name_is_used_once() -> None:
    paths = modules().values()
    names = [node.name for path in paths for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)]
    assert not {name for name, times in Counter(names).items() if times > 1}


def test_only_tests_mock() -> None:
    mocking = {module for module in modules() for item in imports(module) if item.module.startswith("unittest")}
    assert not mocking


@pytest.mark.parametrize(
    ("graph", "groups"),
    [
        ({"a": "b", "b": "c", "c": ""}, []),
        ({"a": "b", "b": "ca", "c": ""}, ["ab"]),
        ({"a": "b", "b": "c", "c": "a", "d": "ea", "e": "d"}, ["abc", "de"]),
    ],
)
def test_circles_are_found(graph: dict[str, str], groups: list[str]) -> None:
    assert circles(graph) == {frozenset(group) for group in groups}
