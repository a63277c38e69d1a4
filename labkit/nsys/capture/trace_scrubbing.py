"""Scrubbing of torch.profiler's captures."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from labkit.nsys.capture.redaction import Redaction
from labkit.nsys.trace import SCHEMA, Trace

NUMBERS = ("grid", "block")  # texts that hold only sizes
CALLED_WITH = ("inputs", "collective")  # JSON, in which a secret may be escaped


def scrub_trace(trace: Trace, clean: Redaction) -> Trace:
    """`trace` with all its names redacted by `clean`, and without the arguments of operators and collectives.

    torch.profiler writes no environment, but a program can put anything into the names of its ranges, and the system
    puts commands into the names of processes and threads.
    """
    frames = {name: _scrubbed(name, frame, clean) for name, frame in trace.frames.items()}
    return replace(trace, **frames)


def _scrubbed(name: str, frame: pd.DataFrame, clean: Redaction) -> pd.DataFrame:
    frame = frame.assign(**{column: pd.Categorical([""] * len(frame)) for column in CALLED_WITH if column in frame})
    texts = [column for column, kind in SCHEMA[name].items() if kind == "category" and column not in NUMBERS]
    return frame.assign(**{column: _replaced(frame[column], clean) for column in texts})


def _replaced(column: pd.Series, clean: Redaction) -> pd.Categorical:
    """The redacted column. Two names may become equal, so the categories get new numbers."""
    numbers, names = pd.factorize(np.array([clean(str(name)) for name in column.cat.categories], object))
    codes = column.cat.codes.to_numpy()
    return pd.Categorical.from_codes(np.where(codes < 0, -1, numbers[codes] if len(numbers) else -1), names)
