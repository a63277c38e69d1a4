"""Runs one pickled call, `-m labkit.nsys.capture.call FILE`: how a function of a notebook gets a process of its own."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle


def write_call(path: Path, function: Callable[..., Any]) -> None:
    """Pickle `function`, to be called without arguments; those of notebooks, lambdas and closures go by value.

    Raises ValueError for what cannot be pickled.
    """
    try:
        path.write_bytes(cloudpickle.dumps(function))
    except (TypeError, pickle.PicklingError) as error:
        raise ValueError(
            f"{getattr(function, '__name__', function)!r} cannot be sent to the profiled process ({error}); let it "
            "make what it needs itself: load models and open files inside the function"
        ) from None


if __name__ == "__main__":
    pickle.loads(Path(sys.argv[1]).read_bytes())()
