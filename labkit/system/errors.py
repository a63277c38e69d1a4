"""The errors that labkit raises on purpose. Everything else that ends a run is a defect, and keeps its traceback."""


class UserError(ValueError):
    """A request that cannot be served as it stands. The message says what was given, what is expected, what to do."""


class UserTypeError(UserError, TypeError):
    """A request with a value of another type than expected."""


class UnsupportedError(UserError, NotImplementedError):
    """A request that labkit does not serve yet."""


class RunError(RuntimeError):
    """A run that could not be brought to its end: a process died, a compiler failed. The message is the whole story."""
