"""The real Nsight Systems, for tests that use it if it is installed."""

import os
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

from labkit.nsys.agent import run_with_agent
from labkit.nsys.process import run
from labkit.nsys.tool import Nsys, find_nsys

NSYS = find_nsys()
needs_nsys = pytest.mark.skipif(NSYS is None, reason="nsys is not installed; labkit doctor says how to")


def loses_plain_ranges(nsys: Nsys) -> bool:
    """Whether this nsys loses the ranges of code other than labkit's, as on Python 3.14 with a newer nvtx."""
    return nsys.version < (2024,) and Version(version("nvtx")) >= Version("0.2.12")


def exported(nsys: Nsys, program: list[str], folder: Path) -> Path:
    """Profiles a program with NVTX ranges; returns the SQLite export of nsys itself."""
    options = ("--trace=nvtx", "--sample=none", "--cpuctxsw=none", "--export=sqlite", f"--output={folder / 'real'}")
    ended = run_with_agent(lambda: run([str(nsys.path), "profile", *options, *program], os.environ))
    assert ended.well, ended
    return folder / "real.sqlite"
