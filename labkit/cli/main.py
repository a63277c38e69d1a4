"""The `labkit` command. Ctrl-C ends it with exit code 130 at any time, even while libraries load.

The handler is set first. Before that Python itself starts, and loads this module, `labkit.system.interrupts` and their
packages, all of them small. Ctrl-C in these milliseconds shows Python's own traceback.
"""

from __future__ import annotations

import sys

from labkit.system.interrupts import INTERRUPTED, interrupts_after_imports


def main() -> None:
    """Runs the command line of this process."""
    try:
        with interrupts_after_imports():
            from labkit.cli.app import app
            from labkit.system.asked_from import from_command_line
            from labkit.system.command import run_command

            with from_command_line():
                run_command(lambda: app(standalone_mode=False))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
