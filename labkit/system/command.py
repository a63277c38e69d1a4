"""A command line that reports expected errors as one line and an exit code."""

from __future__ import annotations

import errno
import os
import re
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
from labkit.system.shown import shown, shown_lines, shown_logs
from labkit.system.terminal import terminal

REFUSED, FAILED = 2, 1
EXTRA = re.compile(r"^(Got unexpected extra arguments?)(?:\(s\))? \((.*)\)$", re.DOTALL)  # the words in the parentheses
UsageError = cast(type[Exception], BadParameter.__mro__[1])  # typer gives it no public name


def run_command(command: Callable[[], object]) -> None:
    """Runs `command` and ends the process. An expected error becomes one line on stderr and an exit code:

    - 2: the request cannot be served as it stands, or a file cannot be used;
    - 1: the command failed on the way, or its output could not be written;
    - 130: Ctrl-C.

    A number that `command` returns is the exit code. Any other error is a defect of labkit and keeps its traceback.
    Control characters in log lines and warnings are escaped.
    """
    try:
        with shown_logs():
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
    except BrokenPipeError:  # the reader has closed the pipe
        _leave(FAILED)
    except OSError as error:
        if error.filename is not None:
            _end(f"{os.fsdecode(error.filename)}: {reason(error)}", REFUSED)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG):
            raise
        _end(f"the output cannot be written: {reason(error)}", FAILED)
    sys.exit(code if isinstance(code, int) else 0)


def _misused(error: Exception) -> None:
    """Reports a command line that labkit does not accept."""
    call = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()  # type: ignore[attr-defined]
        sys.exit(REFUSED)
    cause = error.__cause__
    if cause is not None and hasattr(cause, "errors"):  # from pydantic, with which typer parses values
        error.message = _value(cause.errors()[0])  # type: ignore[attr-defined]
    message = error.format_message().rstrip(".")  # type: ignore[attr-defined]
    message = EXTRA.sub(lambda extra: f"{extra[1]} {extra[2]!r}", message)
    _end(f"{message}; {call.command_path} --help shows what it takes" if call else message, REFUSED)


def _value(problem: Any) -> str:
    return f"got {shown(str(problem['input']))}, {problem_words(problem)}"


def _end(message: str, code: int) -> None:
    with suppress(OSError):  # stderr may be full, too
        console = terminal(stderr=True, highlight=False)
        console.print(f"error: {escape(shown_lines(message))}", style="red", soft_wrap=True)
    _leave(code)


def _leave(code: int) -> None:
    """Ends the process with `code`. Output that could not be written is dropped: a second try of Python's would end
    the process with code 120.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(code)
