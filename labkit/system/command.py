"""A command line whose expected errors are one line and an exit code."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

from rich.markup import escape
from typer import BadParameter

from labkit.system.errors import RunError, UserError
from labkit.system.interrupts import INTERRUPTED
from labkit.system.output_folder import reason
from labkit.system.problem_words import problem_words
from labkit.system.shown import shown, shown_lines
from labkit.system.terminal import terminal

REFUSED, FAILED = 2, 1
UsageError = cast(type[Exception], BadParameter.__mro__[1])  # typer gives it no public name


def run_command(command: Callable[[], object]) -> None:
    """Runs `command`, and ends the process with an exit code and one line on stderr where it raises an expected error.

    Exit code 2: the request cannot be served as it stands, or a file cannot be used. Exit code 1: it failed on the way,
    or what it said could not be written. Exit code 130: Ctrl-C. A number that `command` returns is the exit code.
    Any other error is a defect of labkit and keeps its traceback.
    """
    try:
        code = command()
        sys.stdout.flush()
    except UserError as error:
        _end(str(error), REFUSED)
    except RunError as error:
        _end(str(error), FAILED)
    except UsageError as error:
        _misused(error)
    except KeyboardInterrupt:
        _leave(INTERRUPTED)
    except MemoryError as error:
        _end(f"the memory of this machine does not suffice{f': {error}' if str(error) else ''}", FAILED)
    except BrokenPipeError:  # nobody reads on
        _leave(FAILED)
    except OSError as error:
        if error.filename is not None:
            _end(f"{os.fsdecode(error.filename)}: {reason(error)}", REFUSED)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG):
            raise
        _end(f"the output cannot be written: {reason(error)}", FAILED)
    sys.exit(code if isinstance(code, int) else 0)


def _misused(error: Exception) -> None:
    """Words that are no command line of labkit's."""
    call = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()  # type: ignore[attr-defined]
        sys.exit(REFUSED)
    cause = error.__cause__
    if cause is not None and hasattr(cause, "errors"):  # what pydantic found, by which typer reads values
        error.message = _value(cause.errors()[0])  # type: ignore[attr-defined]
    said = error.format_message().rstrip(".")  # type: ignore[attr-defined]
    _end(f"{said}; {call.command_path} --help shows what it takes" if call else said, REFUSED)


def _value(problem: Any) -> str:
    return f"got {shown(str(problem['input']))}, {problem_words(problem)}"


def _end(message: str, code: int) -> None:
    with suppress(OSError):  # a stderr that is full, too
        console = terminal(stderr=True, highlight=False)
        console.print(f"error: {escape(shown_lines(message))}", style="red", soft_wrap=True)
    _leave(code)


def _leave(code: int) -> None:
    """Ends the process. Python does not try again to write what could not be written, which would end with code 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(code)
