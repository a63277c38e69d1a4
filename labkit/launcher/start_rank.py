"""Becomes one rank's program, on the rank's own processors: `-m labkit.launcher.start_rank COMMAND...`.

As `taskset` does it: the program takes this process over, so that nothing stands between it and torchrun.
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
