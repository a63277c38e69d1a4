"""Compiles a stranger's C++ file, within limits of time, memory and size."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from labkit.kernels.build import compiler
from labkit.system.lifetime import started

FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-fmax-errors=5")
COMPILE_S = 60
LIMITS = "ulimit -t 60; ulimit -v 4000000; ulimit -f 200000; ulimit -c 0"  # seconds, KB, blocks of 512 bytes
SHOWN = 12  # lines of the compiler that are shown


class CompileError(Exception):
    """A file could not be compiled. The message has the compiler's first lines."""


def compiled(source: Path, folder: Path, flags: Sequence[str] = FLAGS) -> Path:
    """The shared library of a C++ file, in `folder`. CompileError: the compiler refused it, or took too long."""
    library = folder / f"{source.stem}.so"
    command = [*compiler(), *flags, str(source), "-o", str(library)]
    limited = ["/bin/sh", "-c", f'{LIMITS}; exec "$@"', "sh", *command]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with started(limited, **pipes) as process:
        try:
            _, said = process.communicate(timeout=COMPILE_S)
        except subprocess.TimeoutExpired:
            raise CompileError(f"it was not compiled within {COMPILE_S} s") from None
    if process.returncode:
        lines = [line.replace(f"{source}:", f"{source.name}:") for line in said.splitlines()]
        raise CompileError("the compiler refused it:\n" + "\n".join(lines[:SHOWN] or ["(it said nothing)"]))
    return library
