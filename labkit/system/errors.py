"""The errors that labkit raises on purpose. Any other error is a defect of labkit, and keeps its traceback.

Messages name strangers' files, tensors and kernels. Their control characters are escaped, in tracebacks, too.
"""

from labkit.system.shown import shown_lines


class _ShownError(Exception):
    def __str__(self) -> str:
        return shown_lines(super().__str__())


class UserError(_ShownError, ValueError):
    """A request that cannot be served as it stands. The message says what it got, what it expected and what to do."""


class UserTypeError(UserError, TypeError):
    """A request with a value of the wrong type."""


class UnsupportedError(UserError, NotImplementedError):
    """A request that labkit does not serve yet."""


class RunError(_ShownError, RuntimeError):
    """A run that could not finish: a process died, a compiler failed. The message says all that a user needs."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message; its type if it has no message."""
    return (str(error).splitlines() or [type(error).__name__])[0]
