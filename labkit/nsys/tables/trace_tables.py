"""The tables that a command of `labkit trace` shows, as frames."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pandas as pd

from labkit.nsys.analysis.rank_numbers import ranks_are_known
from labkit.nsys.tables.catalogue import COMMANDS
from labkit.nsys.tables.doubts import doubts
from labkit.nsys.tables.selection import EVERYTHING, Selection
from labkit.nsys.tables.summary import TraceSummary
from labkit.nsys.trace import Source, Trace
from labkit.system.errors import UserError
from labkit.system.nearest import did_you_mean


@dataclass(frozen=True)
class TraceTables:
    """Tables of one trace, by their names in `labkit.nsys.tables.catalogue`."""

    source: Source
    frames: Mapping[str, pd.DataFrame]
    remarks: tuple[str, ...]  # to read before trusting the tables
    ranks_known: bool  # whether the run itself named the ranks


def trace_tables(trace: Trace, command: str, selection: Selection = EVERYTHING) -> TraceTables:
    """The tables that `labkit trace COMMAND` shows. TraceError if the trace lacks what the command needs.

    The function of a command in the catalogue takes a trace and a selection. It returns the frame of the only table, or
    the frames of several tables by name, and remarks.
    """
    if command not in COMMANDS:
        raise UserError(f"got {command!r}{did_you_mean(command, COMMANDS)}; expected one of {', '.join(COMMANDS)}")
    (first, *_) = COMMANDS[command].tables
    made = catalogued(COMMANDS[command].function)(trace, selection)
    if isinstance(made, TraceSummary):
        return TraceTables(made.source, made.frames, made.remarks, made.ranks_known)
    frames, remarks = ({first.name: made}, ()) if isinstance(made, pd.DataFrame) else made
    return TraceTables(trace.source, frames, (*remarks, *doubts(trace)), ranks_are_known(trace))


def catalogued(function: str) -> Callable[..., Any]:
    """The function that the catalogue names as "module:function". Its module is loaded on first use."""
    module, _, name = function.partition(":")
    loaded: Callable[..., Any] = getattr(import_module(f"labkit.nsys.tables.{module}"), name)
    return loaded
