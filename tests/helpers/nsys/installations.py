"""Installations of Nsight Systems for tests: the machine's own, and scripts that answer like one."""

import shutil
from pathlib import Path

import pytest
from helpers.nsys.nsight import NSYS

from labkit.nsys.tool import Nsys

HELP = """
usage: nsys profile [<args>] [application] [<application args>]

\t-c, --capture-range=

\t   Possible values are none, cudaProfilerApi, nvtx.
\t   When '-c nvtx' is used, see the --nvtx-capture=TEXT option.
\t   Default is none.

\t--capture-range-end=

\t   Possible values are 'none', 'stop', 'repeat[:N]' or 'repeat-shutdown:N'.
\t   If 'none', nothing happens.

\t--cpu-core-events=

\t   Possible values are (for example) '2,3,...'.

\t--cuda-graph-trace=<granularity>[:<launch origin>]

\t   Possible values for <granularity> are 'graph' or 'node'.
\t   If --trace=none is given, this has no effect.

\t   Possible values for <launch origin> are 'host-only' or 'host-and-device'.

\t(Experimental) --congestion-percent=

\t   Values are in the [1,100] range.

\t--export=<format>[,<format>...]

\t   Possible formats are: none arrow sqlite
\t   Create additional output files.

\t--nvtx-domain-[include|exclude]=

\t   Possible values are a comma-separated list of NVTX domains.

\t-p, --nvtx-capture=

\t   Possible values are: `range@domain' to specify both range and domain,
\t   `range' to specify range in default domain.

\t-t, --trace=

\t   Possible values are 'cuda', 'nvtx',
\t   'cublas' or 'none'.
\t   Default is 'cuda,nvtx'.
"""


def nsys_here() -> Nsys:
    """The machine's nsys; without one the test is skipped."""
    if NSYS is None:
        pytest.skip("nsys is not installed; labkit doctor says how to")
    return NSYS


def script(path: Path, answers: dict[str, str]) -> Path:
    """Writes a program that prints the answer to its first argument, and fails if it has none."""
    cases = "\n".join(f"'{word}') cat <<'END'\n{answer}\nEND\n;;" for word, answer in answers.items())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\ncase \"$1\" in\n{cases}\n*) echo 'not known' >&2; exit 3;;\nesac\n")
    path.chmod(0o755)
    return path


def fake_nsys(folder: Path, version: str = "2024.5.1.113-abc", **answers: str) -> Path:
    """Writes a program to `folder` that reports this version of nsys."""
    defaults = {"--version": f"NVIDIA Nsight Systems version {version}", "profile": HELP}
    return script(folder / "nsys", defaults | answers)


def without_host_folder(nsys: Nsys, folder: Path) -> Path:
    """Copy of the target folder of a real installation without the host folder, as a package may leave it."""
    target = folder / "target-linux-x64"
    target.mkdir(parents=True)
    program = nsys.path.resolve()
    for file in program.parent.iterdir():
        if file != program:
            (target / file.name).symlink_to(file)
    return Path(shutil.copy2(program, target))  # nsys searches next to its real path, so this file is not a link
