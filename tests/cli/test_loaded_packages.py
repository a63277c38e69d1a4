"""The packages that `import labkit` and each command load, so that none slows the start unnoticed.

The test lists only packages that pyproject.toml requires, and not what torch loads besides.
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest
from helpers.sweeps import sweep

ROOT = Path(__file__).parents[2]
SHOWN = {"pydantic", "rich", "typer"}
MODELS = {
    *("huggingface-hub", "jinja2", "numpy", "nvtx", "psutil", "safetensors", "scipy", "tokenizers", "torch"),
    *("transformers", "triton", "xxhash"),
}
TABLES = {"cloudpickle", "pandas", "pyarrow"}
CAPTURE = ROOT / "profiles" / "captures" / "gpt2-fused-h100.sqlite"
LOADED = {
    "sides": SHOWN,
    "models": SHOWN,
    "peers": SHOWN | MODELS,
    "doctor": SHOWN | {"numpy", "nvtx", "psutil", "scipy"},
    "generate tiny-gpt2 --prompt Hi --new 2": SHOWN | MODELS,
    "plan-batch tiny-gpt2 --memory-gb 1": SHOWN | MODELS,
    "compare tiny-gpt2 --rounds 2 --new 4 --prompt 4": SHOWN | MODELS,
    "kernels --model tiny-gpt2 --op qkv --rounds 2": SHOWN | MODELS | TABLES,
    f"trace summary {CAPTURE}": SHOWN | TABLES | {"ijson", "numpy", "nvtx", "psutil", "scipy"},
}


def declared() -> set[str]:
    """The packages that pyproject.toml requires."""
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return {_canonical(re.split(r"[>=<; ]", requirement)[0]) for requirement in requirements}


def packages_of(modules: Iterable[str]) -> set[str]:
    installed = metadata.packages_distributions()
    return {_canonical(name) for module in modules for name in installed.get(module.partition(".")[0], [])}


def _canonical(name: str) -> str:
    return name.lower().replace("_", "-")


def loaded_by(program: str, folder: Path, *arguments: str) -> set[str]:
    """The packages of pyproject.toml that a Python program has loaded when it ends."""
    listing = "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); "
    line = [sys.executable, "-P", "-c", listing + program, *arguments]
    process = subprocess.run(line, capture_output=True, text=True, check=True, cwd=folder)
    return packages_of(process.stderr.splitlines()[-1].split()) & declared()


def test_the_import_loads_nothing_that_works(tmp_path: Path) -> None:
    assert loaded_by("import labkit", tmp_path) == set()


@sweep
@pytest.mark.parametrize("command", LOADED)
def test_a_command_loads_no_more_than_it_needs(command: str, tmp_path: Path) -> None:
    loaded = loaded_by("from labkit.cli.main import main; main()", tmp_path, *command.split())
    assert loaded <= LOADED[command]
    assert loaded >= SHOWN
