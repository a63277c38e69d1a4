"""The stage and the step of the model that each piece of GPU work belongs to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from labkit.nsys.analysis.containment import NONE, Intervals, numbered, on_one_line, tightest
from labkit.nsys.analysis.intervals import Union
from labkit.nsys.analysis.labelled import labelled, step_spans
from labkit.nsys.analysis.launches import call_times, first_calls
from labkit.nsys.arrays import Ints
from labkit.nsys.trace import Trace

HOW = ("none", "call", "graph")
BY_NONE, BY_CALL, BY_GRAPH = range(3)
GENERATIONS = 8  # clones of a graph's node that are traced back


@dataclass(frozen=True, eq=False)
class Attribution:
    """The labelled range and the step of each row of `trace.operations`, as rows of `trace.ranges`; -1: none.

    A labelled range is in the domain "labkit" and has a message that `stages.parse` knows. The work of a CUDA graph
    belongs to the innermost labelled range around the creation of the graph's node, on the thread that created it, if
    this range has a stage. All other work belongs to the innermost labelled range around its API call.
    """

    range_of_operation: Ints
    step_of_operation: Ints  # the range that opens the step of the API call; for a graph's work, of the graph's launch
    how: pd.Categorical  # what the range is around: "graph", "call" or "none"
    coverage: float  # share of the operations' durations that has a stage; without GPU work, share of the steps' time


def attribute(trace: Trace) -> Attribution:
    """The stage and the step of each GPU operation, and the share of the time that has a stage."""
    labels = labelled(trace)
    steps = step_spans(labels)
    has_stage = np.append((labels["stage"] != "").to_numpy(), False)  # False at NONE
    calls, by_call = _calls_of_operations(trace)
    nodes = trace.graph_nodes.assign(end_ns=trace.graph_nodes["start_ns"])
    label_line, step_line, call_line, node_line = on_one_line([labels, steps, calls, nodes])

    of_call = np.append(tightest(label_line, call_line), NONE)[by_call]
    step = np.append(tightest(step_line, call_line), NONE)[by_call]
    of_node = _by_graph(trace, tightest(label_line, node_line), has_stage)
    label = np.where(has_stage[of_node], of_node, of_call)
    how = np.where(has_stage[of_node], BY_GRAPH, np.where(of_call != NONE, BY_CALL, BY_NONE))
    return Attribution(
        range_of_operation=np.append(labels["range"].to_numpy(), NONE)[label],
        step_of_operation=np.append(steps["range"].to_numpy(), NONE)[step],
        how=pd.Categorical.from_codes(how, list(HOW)),
        coverage=_coverage(trace, has_stage[label])
        if trace.on_gpu
        else _coverage_on_cpu(label_line[has_stage[:-1]], step_line),
    )


def _calls_of_operations(trace: Trace) -> tuple[pd.DataFrame, Ints]:
    """The calls that led to GPU work, and for each operation the position of its first call."""
    call = first_calls(trace)
    used = np.unique(call[call != NONE])
    position = np.full(len(trace.calls) + 1, NONE)
    position[used] = np.arange(len(used))
    return call_times(trace, used), position[call]


def _by_graph(trace: Trace, range_of_node: Ints, has_stage: NDArray[np.bool_]) -> Ints:
    """For each operation the labelled range in which its graph node was made, if that range has a stage.

    A graph is captured, cloned when it is instantiated, perhaps cloned again, and then launched. The range around the
    creation of a node's first ancestor decides the node's stage.
    """
    nodes, operations = trace.graph_nodes, trace.operations
    range_rows = np.full(len(operations), NONE)
    rows = np.flatnonzero(operations["graph_node"].to_numpy())
    launched = operations.iloc[rows]
    own, original, number = numbered(
        [_named(nodes, "node"), _named(nodes, "original"), _named(launched, "graph_node")], "number"
    )
    made_ns = nodes["start_ns"].to_numpy()
    node = _latest(own, made_ns, number, launched["start_ns"].to_numpy())
    cloned = nodes["original"].to_numpy() != 0
    parent = np.append(np.where(cloned, _latest(own, made_ns, original, made_ns), NONE), NONE)
    for _ in range(GENERATIONS):
        range_row = np.where(node == NONE, NONE, np.append(range_of_node, NONE)[node])
        range_rows[rows] = np.where(has_stage[range_row], range_row, range_rows[rows])
        node = parent[node]
    return range_rows


def _named(frame: pd.DataFrame, column: str) -> pd.DataFrame:
    return frame[["process", column]].rename(columns={column: "number"})


def _latest(own: Ints, made_ns: Ints, number: Ints, until_ns: Ints) -> Ints:
    """For each number the row of the node that had it last at the time `until_ns`, since numbers are reused."""
    times = np.sort(made_ns)
    key = own * (len(times) + 1) + np.searchsorted(times, made_ns, side="right")
    order = np.argsort(key, kind="stable")
    ask = number * (len(times) + 1) + np.searchsorted(times, until_ns, side="right")
    last = np.append(order, NONE)[np.searchsorted(key[order], ask, side="right") - 1]
    return np.where(np.append(own, NONE)[last] == number, last, NONE)


def _coverage(trace: Trace, in_stage: NDArray[np.bool_]) -> float:
    busy_ns = (trace.operations["end_ns"] - trace.operations["start_ns"]).to_numpy()
    return float(busy_ns[in_stage].sum() / max(busy_ns.sum(), 1))


def _coverage_on_cpu(stages: Intervals, steps: Intervals) -> float:
    whole = Union.of(steps.start, steps.end)
    covered_ns = Union.of(stages.start, stages.end).covered_ns(whole.start_ns, whole.end_ns)
    return float(covered_ns.sum() / max(whole.total_ns, 1))
