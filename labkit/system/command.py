"""A command line whose expected errors are one line and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable

from rich.console import Console
from rich.markup import escape

from labkit.system.errors import RunError, UserError

REFUSED, FAILED = 2, 1


def run_command(command: Callable[[], object]) -> None:
    """Runs `command`, and ends the process with an exit code and one line on stderr where it raises an expected error.

    Exit code 2: the request cannot be served as it stands, or a file cannot be used. Exit code 1: it failed on the way.
    Any other error is a defect of labkit and keeps its traceback.
    """
    try:
        command()
    except UserError as error:
        _end(error, REFUSED)
    except RunError as error:
        _end(error, FAILED)
    except OSError as error:
        if error.filename is None:
            raise
        _end(error, REFUSED)


def _end(error: Exception, code: int) -> None:
    console = Console(stderr=True, highlight=False)
    console.print(f"error: {escape(str(error))}", style="red", soft_wrap=True)
    sys.exit(code)
