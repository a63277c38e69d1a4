"""A command that is run to its end, for what it prints."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

from labkit.system.errors import RunError

LAST_LINES = 12


def run_child(command: Sequence[str], failed: str, *, environment: Mapping[str, str] | None = None) -> str:
    """The stdout of `command`, which gets `environment`, or this process's. RunError, which begins with `failed` and
    ends with the last lines of its stderr, where it fails.
    """
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        last = "\n".join(done.stderr.splitlines()[-LAST_LINES:])
        raise RunError(f"{failed}\n{last}")
    return done.stdout
