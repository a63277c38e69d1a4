"""Public ops with any arguments give the result of the reference, or a UserError that names the invalid argument."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.sweeps import sweep

OPS = (
    "gemm",
    "residual_add",
    "mlp_gemm",
    "attention",
    "qkv_gemm",
    "norm_rows",
    "delta_step",
    "experts",
    "route",
    "choose",
)
SCRIPT = Path(__file__).with_name("argument_mutants.py")
FEW, MANY = 25, 400
pytestmark = pytest.mark.timeout(900)  # kernels of four weight types may be compiled first


def check_mutants(folder: Path, examples: int, *ops: str) -> None:
    """Runs the script in a process of its own, because a kernel may end the process."""
    latest = folder / "latest"
    process = subprocess.run(
        [sys.executable, "-P", str(SCRIPT), str(latest), str(examples), *ops],
        env=os.environ | {"PYTHONPATH": str(SCRIPT.parent.parent)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, f"{process.stderr[-5000:]}\n{latest.read_text()}"
    counts = [[int(count) for count in line.split()] for line in process.stdout.splitlines()]
    assert len(counts) == len(ops)
    assert all(results > 0 and refused > 0 for results, refused in counts)


def test_arguments_that_do_not_fit_are_refused_and_others_give_the_reference(tmp_path: Path) -> None:
    check_mutants(tmp_path, FEW, *OPS)


@sweep
@pytest.mark.parametrize("op", OPS)
def test_many_arguments_that_do_not_fit_are_refused(op: str, tmp_path: Path) -> None:
    check_mutants(tmp_path, MANY, op)


def test_a_kernel_that_gets_no_memory_raises_and_ends_no_process(tmp_path: Path) -> None:
    script = SCRIPT.with_name("scarce_memory.py")
    process = subprocess.run(
        [sys.executable, "-P", str(script), str(tmp_path / "layers")],
        env=os.environ | {"PYTHONPATH": str(script.parent.parent)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    failures, error = process.stdout.splitlines()
    assert int(failures) > 3
    assert "a stream from a file could not start: the system has no memory or no thread left" in error
