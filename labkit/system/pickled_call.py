"""Pickles function calls for another process; functions of notebooks, lambdas and closures are pickled by value."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle

from labkit.system.errors import UserError


def pickle_call(function: Callable[[], Any], name: str | None = None) -> bytes:
    """The pickle of `function`, which the other process calls without arguments. name: its name in the error message.

    Raises ValueError if it cannot be pickled.
    """
    try:
        return cloudpickle.dumps(function)
    except (TypeError, pickle.PicklingError) as error:
        raise UserError(
            f"{name or getattr(function, '__name__', function)!r} cannot be sent to the process that runs it "
            f"({error}); load models and open files inside the function instead"
        ) from None
