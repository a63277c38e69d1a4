"""The wheel contains the whole of labkit and nothing else; it is installed where the checkout is not visible."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CARRIED = ("notebooks", "profiles/captures")
IMPORT_ALL = """
import importlib, pkgutil, sys, labkit
names = ["labkit", *(module.name for module in pkgutil.walk_packages(labkit.__path__, "labkit."))]
for name in names:
    print(importlib.import_module(name).__file__)
from labkit.notebooks.carried import carried_notebooks
from labkit.studies.traces import bundled_pair
pair = bundled_pair()
print(*carried_notebooks().values(), *pair.vanilla.files, *pair.fused.files)
print("generated:", flush=True)
from labkit.cli.main import main
sys.argv = ["labkit", "generate", "tiny-gpt2", "--prompt", "Fused"]
main()
"""


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    process = subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sdist built from a copy, because setuptools leaves build/ and egg-info next to the sources."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("sdist")
    for folder in ("labkit", "kernels", *CARRIED):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    run(sys.executable, "-c", f"from setuptools import build_meta as b; b.build_sdist({str(out)!r})", cwd=tree)
    (archive,) = out.iterdir()
    return archive


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    options = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", out)
    run(sys.executable, "-m", "pip", "wheel", *options, sdist, cwd=out)
    (archive,) = out.iterdir()
    return archive


@pytest.fixture(scope="module")
def fresh(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment with the wheel and our dependencies, but without the editable install. Python
    ignores the .pth files in a folder that is itself named in a .pth file.
    """
    environment = tmp_path_factory.mktemp("fresh")
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=environment)
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=environment).strip()
    (Path(site) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python.parent


def test_wheel_holds_every_file_of_the_tree(wheel: Path) -> None:
    def files(folder: str, prefix: str) -> set[str]:
        paths = [path for path in (ROOT / folder).rglob("*") if path.is_file()]
        paths = [path for path in paths if not {"__pycache__", ".ipynb_checkpoints"} & set(path.parts)]
        return {prefix + path.relative_to(ROOT).as_posix() for path in paths}

    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    carried = {file for folder in CARRIED for file in files(folder, "labkit/carried/")}
    assert carried
    assert packed == files("labkit", "") | files("kernels", "labkit/") | carried


def test_sdist_holds_the_licence(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        assert any(name.endswith("/LICENSE") for name in archive.getnames())


@pytest.mark.sweep
def test_every_module_imports_from_the_wheel_and_its_kernels_compile_and_generate(fresh: Path, tmp_path: Path) -> None:
    variables = {"LABKIT_CACHE": str(tmp_path), "LABKIT_ISA": "portable", "HF_HUB_OFFLINE": "1"}
    files, _, text = run(fresh / "python", "-c", IMPORT_ALL, cwd=tmp_path, **variables).partition("generated:\n")
    assert files
    assert all(Path(file).is_file() and Path(file).is_relative_to(fresh.parent) for file in files.split())
    assert {".py", ".ipynb", ".sqlite"} == {Path(file).suffix for file in files.split()}
    assert "Fused" in text
    assert list(tmp_path.rglob("*.so"))


def test_wheel_exposes_no_top_level_kernels(fresh: Path, tmp_path: Path) -> None:
    program = "import importlib.util as u, labkit; print(u.find_spec('kernels'))"
    assert run(fresh / "python", "-c", program, cwd=tmp_path).strip() == "None"


def test_the_wheel_brings_the_command(fresh: Path, tmp_path: Path) -> None:
    assert "labkit compare" in run(fresh / "labkit", "compare", "--help", cwd=tmp_path)
