"""The shades of a trace's events: the stage of each event, or the family of work that its name tells."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from labkit.nsys.analysis.attribution import Attribution
from labkit.nsys.analysis.launches import first_calls
from labkit.nsys.analysis.nesting import innermost
from labkit.nsys.arrays import Ints
from labkit.nsys.tables.families import COPY, FAMILIES, WAITING, kernel_family, operator_family
from labkit.nsys.trace import Trace
from labkit.stages import DOMAIN, Label, Phase, Stage, parse

STEP, OTHER = "step", "other"
OF_STAGES: tuple[str, ...] = (*(stage.value for stage in Stage), STEP, OTHER)  # steps and phases share a colour
SHADES = (*OF_STAGES, *(family for family in FAMILIES if family not in OF_STAGES))  # "attention" is either
CODE = {shade: np.uint8(code) for code, shade in enumerate(SHADES)}
OPERATOR = re.compile(r"^\w+::\w|^nccl")  # a range that PyTorch's profiler named after the operator in it
Codes = NDArray[np.uint8]


def labels(trace: Trace) -> tuple[list[Label | None], NDArray[np.int64]]:
    """The label of each category of the ranges' names, and the category of each range; -1 outside labkit's domain."""
    names, domains = trace.ranges["name"].cat, trace.ranges["domain"].cat
    ours = domains.categories.get_indexer([DOMAIN])[0]
    code = np.where(domains.codes.to_numpy() == ours, names.codes.to_numpy(), -1) if ours >= 0 else -1
    return [parse(name) for name in names.categories], np.broadcast_to(code, len(trace.ranges)).astype(np.int64)


def has_labels(trace: Trace) -> bool:
    """Whether any range of the trace is labkit's."""
    return bool((trace.ranges["domain"] == DOMAIN).any())


def first_decode_step(trace: Trace) -> int | None:
    """The start of the first decode step, on the trace's clock; None without a range of decode."""
    parsed, code = labels(trace)
    decode = [label is not None and label.phase is Phase.DECODE for label in parsed]
    for is_start in (
        [label is not None and label.step and is_decode for label, is_decode in zip(parsed, decode, strict=True)],
        decode,
    ):
        rows = np.append(np.array(is_start, bool), False)[code]  # code -1 takes the last element, False
        if rows.any():
            return int(trace.ranges["start_ns"].to_numpy()[rows].min())
    return None


def shades(trace: Trace, threads: tuple[Ints, Ints], attribution: Attribution | None) -> tuple[Codes, Codes, Codes]:
    """The position in SHADES of each range, call and operation.

    A range of labkit has its label's shade. Other ranges and calls have the shade of the innermost stage around them. A
    GPU operation has its call's shade, or that of its range in `attribution`. In a trace without labkit's ranges
    the shade is the family that the name of an operator or kernel tells. `threads`: the numbers of the threads of
    ranges and of calls.
    """
    parsed, code = labels(trace)
    if (code < 0).all():
        return _families(trace)
    own = np.array([_shade(label) for label in parsed] + [CODE[OTHER]], np.uint8)[code]
    stages = np.flatnonzero(own < len(Stage))
    starts, ends = (trace.ranges[name].to_numpy() for name in ("start_ns", "end_ns"))
    holders = (starts[stages], ends[stages], threads[0][stages])
    stage_of = np.append(own[stages], CODE[OTHER])

    others = np.flatnonzero(own == CODE[OTHER])
    own[others] = stage_of[innermost(starts[others], ends[others], threads[0][others], holders)]
    called = (trace.calls["start_ns"].to_numpy(), trace.calls["end_ns"].to_numpy(), threads[1])
    of_calls = stage_of[innermost(*called, holders)]
    if attribution is None:
        return own, of_calls, np.append(of_calls, CODE[OTHER])[first_calls(trace)]
    worked = np.append(own, CODE[OTHER])[attribution.range_of_operation]
    worked[worked == CODE[STEP]] = CODE[OTHER]
    return own, of_calls, worked


def _shade(label: Label | None) -> np.uint8:
    if label is None:
        return CODE[OTHER]
    return CODE[STEP if label.stage is None else label.stage.value]


def _families(trace: Trace) -> tuple[Codes, Codes, Codes]:
    operators = trace.calls["kind"].eq("op").to_numpy()
    kinds = trace.operations["kind"]
    moves, computes = kinds.isin(["memcpy", "memset"]).to_numpy(), kinds.eq("kernel").to_numpy()
    of_kernels = np.where(computes, _by_name(trace.operations, kernel_family), CODE[OTHER])
    return (
        _by_name(trace.ranges, lambda name: operator_family(name) if OPERATOR.search(name) else OTHER),
        np.where(operators, _by_name(trace.calls, operator_family), _by_name(trace.calls, _call_family)),
        np.where(moves, CODE[COPY], of_kernels),
    )


def _call_family(name: str) -> str:
    return WAITING if "Synchronize" in name else OTHER


def _by_name(frame: pd.DataFrame, family: Callable[[str], str]) -> Codes:
    names = frame["name"].cat
    of_category = [CODE[family(str(name))] for name in names.categories]
    return np.array([*of_category, CODE[OTHER]], np.uint8)[names.codes]
