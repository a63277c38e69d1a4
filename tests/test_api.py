"""Names in `labkit`: completion lists them before any module is loaded, and each of them can be imported."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import labkit

PACKAGES = ("labkit", "labkit.conversation", "labkit.figures", "labkit.harness", "labkit.notebooks", "labkit.nsys",
            "labkit.statistics", "labkit.widgets")  # fmt: skip


@pytest.mark.parametrize("package", PACKAGES)
def test_completion_shows_the_whole_api(package: str) -> None:
    module = import_module(package)
    assert set(module.__all__) <= set(dir(module))
    assert all(getattr(module, name) is not None for name in module.__all__)


def test_looking_at_the_names_loads_nothing_large() -> None:
    program = "import sys, labkit, labkit.nsys; dir(labkit), dir(labkit.nsys); print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"torch", "pandas", "plotly", "transformers"} & set(loaded)


def test_packages_are_there_without_an_import_of_their_own() -> None:
    program = (
        "import labkit; assert 'nsys' in dir(labkit); labkit.nsys.read, labkit.figures.timeline, labkit.stages.parse"
    )
    subprocess.run([sys.executable, "-P", "-c", program], check=True)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'labkit' has no attribute 'init_interference'"):
        _ = import_module("labkit").init_interference


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("labkit.engine.options.Options", {"dtype", "offload", "tensor_parallel"}),
        ("labkit.engine.offload.options.Offload", {"device", "resident_gb"}),
        ("labkit.harness.runs.Case", {"model", "batch"}),
    ],
)
def test_completion_shows_no_names_of_pydantic(kind: str, names: set[str]) -> None:
    module, _, name = kind.rpartition(".")
    options = getattr(import_module(module), name)
    for item in (options, options.model_construct()):
        public_names = {name for name in dir(item) if not name.startswith("_")}
        assert names <= public_names
        assert not [name for name in public_names if name.startswith("model_") or name in {"json", "copy", "validate"}]


def test_types_are_shipped() -> None:
    assert (Path(labkit.__file__).parent / "py.typed").is_file()
