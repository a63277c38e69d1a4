"""The parts of steps: pieces of work with their stage, and the time in which nothing ran."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from labkit.nsys.analysis.attribution import Attribution
from labkit.nsys.analysis.communication import communicates
from labkit.nsys.analysis.intervals import Union, fresh_start_ns, innermost_ns
from labkit.nsys.analysis.labelled import labelled
from labkit.nsys.analysis.nesting import innermost
from labkit.nsys.analysis.steps import GPU, steps_of_operations, within_steps
from labkit.nsys.arrays import Ints
from labkit.nsys.trace import Trace
from labkit.stages import Stage

NO_STAGE = "no stage"
OPERATIONS, OPERATORS, RANGES = "GPU operations", "operators", "ranges of stages"
UNSEEN = 0.5  # share of a stage's time, in one stretch


@dataclass(frozen=True)
class StepWork:
    """The steps of a trace and their pieces of work.

    `pieces` has one row per GPU operation, operator or range of a stage that belongs to a step. Its columns:

    - step: the position in `steps`;
    - instance: a number for the range of its stage within this step;
    - layer (-1: none), stage (NO_STAGE: none), start_ns, end_ns;
    - own_ns: its duration without the pieces nested in it;
    - new_ns: the part of the step's time that it covers and no earlier piece does;
    - communication: bool;
    - exposed_ns: for communication, the time in which its device computes nothing.

    `steps` is the frame of labkit.nsys.analysis.steps with idle_ns, the time in which nothing of the process runs. A
    step's idle_ns, the new_ns of its pieces and the time of work that belongs to no step add up to its duration_ns.
    """

    pieces: pd.DataFrame
    steps: pd.DataFrame
    unit: str  # OPERATIONS, OPERATORS or RANGES


def work(trace: Trace, steps: pd.DataFrame, attribution: Attribution) -> StepWork:
    """The GPU operations of steps that are timed on the GPU, else the ranges of stages."""
    return gpu_work(trace, steps, attribution) if (steps["clock"] == GPU).all() else stage_work(trace, steps)


def gpu_work(trace: Trace, steps: pd.DataFrame, attribution: Attribution) -> StepWork:
    """The GPU operations of each step. Copies and memsets count as kernels do."""
    of_step = steps_of_operations(steps, attribution)
    worked = np.flatnonzero(of_step >= 0)
    step, range_row = of_step[worked], attribution.range_of_operation[worked]
    labels = labelled(trace).set_index("range")[["layer", "stage"]].reindex(range_row)
    exchanges = communicates(trace.operations)
    stage = labels["stage"].fillna("").replace("", NO_STAGE).to_numpy(object)
    exchanges[worked[stage == Stage.ALL_REDUCE]] = True
    start, end = (trace.operations[name].to_numpy()[worked] for name in ("start_ns", "end_ns"))
    end = np.maximum(start, end)
    opens, closes = (steps[name].to_numpy()[step] for name in ("start_ns", "end_ns"))
    clipped = np.clip(start, opens, closes), np.clip(end, opens, closes)
    pieces = pd.DataFrame(
        {
            "step": step,
            "instance": step * (len(trace.ranges) + 1) + range_row + 1,
            "layer": labels["layer"].fillna(-1).to_numpy(np.int64),
            "stage": stage,
            "start_ns": start,
            "end_ns": end,
            "own_ns": end - start,
            "new_ns": clipped[1] - fresh_start_ns(*clipped, step),
            "communication": exchanges[worked],
            "exposed_ns": _exposed_ns(trace.operations, exchanges, worked, step),
        }
    )
    idle = steps["duration_ns"].to_numpy().copy()
    for process, union in busy_times(trace).items():
        rows = (steps["process"] == process).to_numpy()
        idle[rows] -= union.covered_ns(*(steps.loc[rows, name].to_numpy() for name in ("start_ns", "end_ns")))
    return StepWork(pieces, steps.assign(idle_ns=idle), OPERATIONS)


def busy_times(trace: Trace) -> dict[int, Union]:
    """By process, the times in which one of its operations runs on a GPU."""
    return {
        int(process): Union.of(of_process["start_ns"].to_numpy(), of_process["end_ns"].to_numpy())
        for process, of_process in trace.operations.groupby("process")
    }


def _exposed_ns(operations: pd.DataFrame, exchanges: NDArray[np.bool_], rows: Ints, step: Ints) -> Ints:
    """For each operation in `rows`, 0, or if it communicates, the time in which its device computes nothing."""
    exposed = np.zeros(len(rows), np.int64)
    communicating = np.flatnonzero(exchanges[rows])
    if not len(communicating):
        return exposed
    start, end = operations["start_ns"].to_numpy(), operations["end_ns"].to_numpy()
    device = operations.groupby(["process", "device"]).ngroup().to_numpy()
    for number in np.unique(device[rows[communicating]]):
        of_device = communicating[device[rows[communicating]] == number]
        computes = (device == number) & ~exchanges
        computing = Union.of(start[computes], end[computes])
        until = end[rows[of_device]]
        begin = fresh_start_ns(start[rows[of_device]], until, step[of_device])
        exposed[of_device] = until - begin - computing.covered_ns(begin, until)
    return exposed


def stage_work(trace: Trace, steps: pd.DataFrame) -> StepWork:
    """The ranges of stages of each step, on the CPU. Idle is the time outside these ranges."""
    return _on_threads(_stage_ranges(trace, steps), steps, RANGES)


def operator_work(trace: Trace, steps: pd.DataFrame) -> StepWork:
    """PyTorch's operators of each step that no other operator called. Idle is the time outside these operators.

    A stage calls a kernel that is not PyTorch's if a stretch of more than half of its time (UNSEEN) has no operator.
    Each range of such a stage counts as one piece. Overhead, in contrast, comes in many short stretches.
    """
    stages, operators = _stage_ranges(trace, steps), outer_operators(trace, steps)
    stretch = _longest_without(stages, operators).groupby(stages["stage"]).sum()
    length = (stages["end_ns"] - stages["start_ns"]).groupby(stages["stage"]).sum()
    whole = stretch.index[stretch > UNSEEN * length]
    pieces = pd.concat([operators[~operators["stage"].isin(whole)], stages[stages["stage"].isin(whole)]])
    return _on_threads(pieces.sort_values(["thread", "start_ns"], ignore_index=True), steps, OPERATORS)


def _longest_without(stages: pd.DataFrame, operators: pd.DataFrame) -> pd.Series:
    """For each range of a stage, the longest stretch without any of its operators, in ns."""
    edges = stages[["instance", "start_ns", "end_ns"]]
    opened = edges.assign(start_ns=edges["start_ns"], end_ns=edges["start_ns"])
    closed = edges.assign(start_ns=edges["end_ns"])
    times = pd.concat([opened, operators[["instance", "start_ns", "end_ns"]], closed])
    times = times[times["instance"] >= 0].sort_values(["instance", "start_ns"], kind="stable")
    stretches = times["start_ns"] - times.groupby("instance")["end_ns"].shift()
    return stretches.groupby(times["instance"]).max().reindex(edges["instance"]).set_axis(stages.index)


def outer_operators(trace: Trace, steps: pd.DataFrame) -> pd.DataFrame:
    """The operators of PyTorch within steps that no other operator called, with the stage of each.

    Columns: process, tid, start_ns, end_ns, step, thread, and from its stage: instance (-1: none), layer, stage.
    """
    stages = _stage_ranges(trace, steps)
    calls = trace.calls[(trace.calls["kind"] == "op").to_numpy()]
    operators = within_steps(calls[["process", "tid", "start_ns", "end_ns"]], steps)
    operators = operators.sort_values(["thread", "start_ns", "end_ns"], ascending=[True, True, False])
    times = (operators["start_ns"].to_numpy(), operators["end_ns"].to_numpy(), operators["thread"].to_numpy())
    operators = operators[(fresh_start_ns(*times) == times[0]) & (times[1] > times[0])]
    nested = ("start_ns", "end_ns", "thread")
    inner, outer = ([frame[name].to_numpy(np.int64) for name in nested] for frame in (operators, stages))
    range_row = innermost(inner[0], inner[1], inner[2], (outer[0], outer[1], outer[2]))
    labels = stages[["instance", "layer", "stage"]].take(np.maximum(range_row, 0) if len(stages) else range_row[:0])
    labels = labels.set_axis(operators.index)
    labels.loc[range_row < 0] = [-1, -1, NO_STAGE]
    return operators.join(labels)


def _stage_ranges(trace: Trace, steps: pd.DataFrame) -> pd.DataFrame:
    ranges = labelled(trace)
    ranges = within_steps(ranges[ranges["stage"] != ""], steps)
    return ranges.rename(columns={"range": "instance"}).reset_index(drop=True)


def _own_ns(pieces: pd.DataFrame) -> Ints:
    own = np.zeros(len(pieces), np.int64)
    for rows in pieces.reset_index(drop=True).groupby("thread").indices.values():
        own[rows] = innermost_ns(*(pieces[name].to_numpy(np.int64)[rows] for name in ("start_ns", "end_ns")))
    return own


def _on_threads(pieces: pd.DataFrame, steps: pd.DataFrame, unit: str) -> StepWork:
    own = _own_ns(pieces)
    exchanges = (pieces["stage"] == Stage.ALL_REDUCE).to_numpy(bool)
    pieces = pieces[["step", "instance", "layer", "stage", "start_ns", "end_ns"]].assign(
        own_ns=own, new_ns=own, communication=exchanges, exposed_ns=np.where(exchanges, own, 0)
    )
    covered = np.bincount(pieces["step"].to_numpy(), weights=own, minlength=len(steps)).astype(np.int64)
    return StepWork(pieces, steps.assign(idle_ns=steps["duration_ns"].to_numpy() - covered), unit)
