"""Write a model as a side reads it, in a process of its own, since it may take several times the memory of the weights.

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

from labkit.harness.compare.providers import provider_of
from labkit.system.child import finished
from labkit.system.errors import RunError
from labkit.system.owned_folder import owned_folder
from labkit.weights.resolve import resolve

RAISED = re.compile(r"([\w.]+\.)?[A-Z]\w*(Error|Exception|Failure|Unsupported)\w*: ")  # the first line of an exception


@contextmanager
def converted(side: str, model: str, *, dtype: str, seed: int, scratch: Path | None = None) -> Iterator[Path]:
    """A folder with `model` as this side reads it, removed when the context ends; empty for a side that reads the
    vanilla model. It is made in `scratch`, or in the folder for temporary files. RunError, one line: there is none.
    """
    provider = provider_of(side)
    assert provider is not None
    with owned_folder("labkit-peer-", scratch) as folder:
        if provider.converts:
            _convert(side, model, dtype, seed, folder)
        yield folder


def _convert(side: str, model: str, dtype: str, seed: int, folder: Path) -> None:
    arguments = [side, model, str(seed), dtype, str(folder)]
    command = [sys.executable, "-P", "-m", "labkit.harness.compare.conversion", *arguments]
    done = finished(command)
    if done.returncode:
        raise RunError(f"{side} could not convert {model} in {dtype}: {_cause(done)}")


def _cause(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode < 0:
        return f"its converter was killed by {signal.Signals(-done.returncode).name}"
    lines = done.stderr.strip().splitlines() or ["its converter said nothing"]
    return ([line for line in lines if RAISED.match(line)] or lines)[-1]


def main() -> None:
    """Convert what the command line names."""
    side, model, seed, dtype, folder = sys.argv[1:]
    provider = provider_of(side)
    assert provider is not None
    provider.convert(side, resolve(model, seed=int(seed)), dtype, Path(folder))


if __name__ == "__main__":
    main()
