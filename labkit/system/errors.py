"""The errors that labkit raises on purpose. Any other error is a defect of labkit, and keeps its traceback."""


class UserError(ValueError):
    """A request that cannot be served as it stands. The message says what it got, what it expected and what to do."""


class UserTypeError(UserError, TypeError):
    """A request with a value of the wrong type."""


class UnsupportedError(UserError, NotImplementedError):
    """A request that labkit does not serve yet."""


class RunError(RuntimeError):
    """A run that could not finish: a process died, a compiler failed. The message says all that a user needs."""
