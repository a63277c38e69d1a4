"""Writes a model as a side reads it, in a process of its own, because that may take several times the weights' memory.

python -P -m labkit.harness.compare.conversion SIDE MODEL SEED DTYPE FOLDER
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from xxhash import xxh3_128_hexdigest

from labkit.harness.compare.installation import INSTALLED, Installation
from labkit.harness.compare.loader import FolderLoader, loader_of
from labkit.system.child import finished
from labkit.system.errors import RunError
from labkit.system.owned_folder import owned_folder
from labkit.weights.protocol import identity_of
from labkit.weights.resolve import resolve

RAISED = re.compile(r"([\w.]+\.)?[A-Z]\w*(Error|Exception|Failure|Unsupported)\w*: ")  # the first line of an exception


@contextmanager
def converted(
    side: str, model: str, *, dtype: str, seed: int, scratch: Path | None = None, installation: Installation = INSTALLED
) -> Iterator[Path]:
    """A folder with `model` as this side of `installation` reads it; empty for a side that reads the vanilla model.

    The folder is removed when the context ends. With `scratch` it stays in that folder, and later calls for the same
    side and the same weights use it again. RunError of one line where the conversion fails.
    """
    loader = loader_of(side)
    assert isinstance(loader, FolderLoader)
    stored = None if scratch is None else scratch / _name(side, model, dtype, seed)
    if stored is not None and stored.is_dir():
        yield stored
        return
    with owned_folder("labkit-peer-", scratch) as folder:
        if loader.converts:
            _convert(side, model, dtype, seed, folder, installation)
        if stored is not None:
            folder = folder.rename(stored)
        yield folder


def _name(side: str, model: str, dtype: str, seed: int) -> str:
    """Name of the folder that stays. It depends on the weights."""
    identity = identity_of(resolve(model, seed=seed))
    return f"{side.replace(':', '-')}-{dtype}-{xxh3_128_hexdigest(f'{model} {identity}'.encode())[:16]}"


def _convert(side: str, model: str, dtype: str, seed: int, folder: Path, installation: Installation) -> None:
    arguments = [side, model, str(seed), dtype, str(folder)]
    command = installation.module("labkit.harness.compare.conversion", *arguments)
    process = finished(command, environment=installation.variables())
    if process.returncode:
        raise RunError(f"{side} could not convert {model} in {dtype}: {_cause(process)}")


def _cause(process: subprocess.CompletedProcess[str]) -> str:
    if process.returncode < 0:
        return f"its converter was killed by {signal.Signals(-process.returncode).name}"
    lines = process.stderr.strip().splitlines() or ["its converter printed no error"]
    return ([line for line in lines if RAISED.match(line)] or lines)[-1]


def main() -> None:
    """Converts the model of the command line."""
    side, model, seed, dtype, folder = sys.argv[1:]
    loader = loader_of(side)
    assert isinstance(loader, FolderLoader)
    loader.convert(side, resolve(model, seed=int(seed)), dtype, Path(folder))


if __name__ == "__main__":
    main()
