"""Becomes one rank's program, pinned to the rank's processors: `-m labkit.launcher.start_rank COMMAND...`.

The program replaces this process, as with `taskset`, so that it is a direct child of torchrun.
"""

import os
import sys
from pathlib import Path

from labkit.launcher.shares import PIN, pin_this_rank
from labkit.launcher.stopped import PIDS
from labkit.system.lifetime import end_with_parent

if __name__ == "__main__":
    end_with_parent()
    pin_this_rank()
    Path(os.environ[PIDS], f"{os.environ['RANK']}.{os.getpid()}").touch()
    command = sys.argv[1:]
    try:
        os.execvpe(command[0], command, os.environ | {PIN: "0"})
    except OSError as error:
        sys.exit(f"{command[0]} can't be started: {error.strerror}")
