"""Which stage and which step of the model each piece of GPU work belongs to."""

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
GENERATIONS = 8  # of clones of a graph's node that are followed


@dataclass(frozen=True, eq=False)
class Attribution:
    """For each row of `trace.operations`, rows of `trace.ranges`, -1 where there is none.

    `range_of_operation`: the innermost labelled range, which is one of the domain "labkit" with a message that
    `stages.parse` knows. For work of a CUDA graph it is the one around the making of the graph's node, on the thread
    that made it, if that one has a stage; otherwise, and for all other work, the one around the API call. `how` says
    which it was: "graph", "call" or "none".
    `step_of_operation`: the range that opens the step in which the API call was made, for a graph's work its launch.
    `coverage`: the share of the GPU's busy time, the sum of all durations, that belongs to a stage; of a trace without
    GPU work, the share of the steps' time that stages cover.
    """

    range_of_operation: Ints
    step_of_operation: Ints
    how: pd.Categorical
    coverage: float


def attribute(trace: Trace) -> Attribution:
    """What belongs to which stage and step, and how much of the time does."""
    labels = labelled(trace)
    steps = step_spans(labels)
    has_stage = np.append((labels["stage"] != "").to_numpy(), False)  # also at NONE
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
    """The calls that led to GPU work, and for each operation the position of its call; of several calls, the first."""
    call = first_calls(trace)
    used = np.unique(call[call != NONE])
    position = np.full(len(trace.calls) + 1, NONE)
    position[used] = np.arange(len(used))
    return call_times(trace, used), position[call]


def _by_graph(trace: Trace, range_of_node: Ints, has_stage: NDArray[np.bool_]) -> Ints:
    """For each operation the labelled range in which its graph node was made, if that range has a stage.

    A graph is captured, cloned when it is instantiated, perhaps cloned again, and then played. The range in which its
    first ancestor was made is the one that says which stage the node belongs to.
    """
    nodes, operations = trace.graph_nodes, trace.operations
    found = np.full(len(operations), NONE)
    playing = np.flatnonzero(operations["graph_node"].to_numpy())
    played = operations.iloc[playing]
    own, original, wanted = numbered(
        [_named(nodes, "node"), _named(nodes, "original"), _named(played, "graph_node")], "number"
    )
    made_ns = nodes["start_ns"].to_numpy()
    node = _latest(own, made_ns, wanted, played["start_ns"].to_numpy())
    cloned = nodes["original"].to_numpy() != 0
    parent = np.append(np.where(cloned, _latest(own, made_ns, original, made_ns), NONE), NONE)
    for _ in range(GENERATIONS):
        here = np.where(node == NONE, NONE, np.append(range_of_node, NONE)[node])
        found[playing] = np.where(has_stage[here], here, found[playing])
        node = parent[node]
    return found


def _named(frame: pd.DataFrame, column: str) -> pd.DataFrame:
    return frame[["process", column]].rename(columns={column: "number"})


def _latest(own: Ints, made_ns: Ints, wanted: Ints, until_ns: Ints) -> Ints:
    """For each wanted number the row of the node that had it last, at the given time: numbers are used again."""
    times = np.sort(made_ns)
    key = own * (len(times) + 1) + np.searchsorted(times, made_ns, side="right")
    order = np.argsort(key, kind="stable")
    ask = wanted * (len(times) + 1) + np.searchsorted(times, until_ns, side="right")
    last = np.append(order, NONE)[np.searchsorted(key[order], ask, side="right") - 1]
    return np.where(np.append(own, NONE)[last] == wanted, last, NONE)


def _coverage(trace: Trace, in_stage: NDArray[np.bool_]) -> float:
    busy_ns = (trace.operations["end_ns"] - trace.operations["start_ns"]).to_numpy()
    return float(busy_ns[in_stage].sum() / max(busy_ns.sum(), 1))


def _coverage_on_cpu(stages: Intervals, steps: Intervals) -> float:
    whole = Union.of(steps.start, steps.end)
    covered_ns = Union.of(stages.start, stages.end).covered_ns(whole.start_ns, whole.end_ns)
    return float(covered_ns.sum() / max(whole.total_ns, 1))
