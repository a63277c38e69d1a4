"""Write a model as a peer reads it, in a process of its own, since it may take several times the memory of the weights.

python -P -m labkit.harness.compare.peers.conversion SIDE MODEL SEED DTYPE FOLDER
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from labkit.harness.compare.peers.table import PEER_OF_SIDE
from labkit.system.child import finished
from labkit.system.errors import RunError
from labkit.system.owned_folder import owned_folder
from labkit.weights.resolve import resolve

RAISED = re.compile(r"([\w.]+\.)?[A-Z]\w*(Error|Exception|Failure|Unsupported)\w*: ")  # the first line of an exception


@contextmanager
def converted(side: str, model: str, *, dtype: str, seed: int) -> Iterator[Path]:
    """A folder with `model` as this side reads it, removed when the context ends; empty for a side that reads the
    vanilla model. RunError, one line: there is none.
    """
    with owned_folder("labkit-peer-") as folder:
        if PEER_OF_SIDE[side].converts:
            _convert(side, model, dtype, seed, folder)
        yield folder


def _convert(side: str, model: str, dtype: str, seed: int, folder: Path) -> None:
    arguments = [side, model, str(seed), dtype, str(folder)]
    command = [sys.executable, "-P", "-m", "labkit.harness.compare.peers.conversion", *arguments]
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
    PEER_OF_SIDE[side].convert(side, resolve(model, seed=int(seed)), dtype, Path(folder))


if __name__ == "__main__":
    main()
