"""The ranges that name the model's stages, and the start and end of each step on its thread."""

from __future__ import annotations

import numpy as np
import pandas as pd

from labkit.nsys.trace import Trace
from labkit.stages import DOMAIN, Label, Phase, Stage, parse


def labelled(trace: Trace) -> pd.DataFrame:
    """The ranges of the domain "labkit" with a message that `stages.parse` knows, by thread and start, the outer first.

    Columns: range (row in trace.ranges), process, tid, start_ns, end_ns, phase, layer (-1: none), stage ("": none),
    step (bool: the range encloses one step).
    """
    names = trace.ranges["name"].cat
    labels = [parse(name) for name in names.categories]
    known = np.array([label is not None for label in labels] + [False])
    rows = np.flatnonzero(known[names.codes] & (trace.ranges["domain"] == DOMAIN).to_numpy())
    fields = pd.DataFrame(map(_fields_of, labels), columns=["phase", "layer", "stage", "step"])
    ranges = trace.ranges[["process", "tid", "start_ns", "end_ns"]].iloc[rows].reset_index(drop=True)
    ranges = pd.concat([ranges, fields.iloc[names.codes.iloc[rows]].reset_index(drop=True)], axis=1)
    ranges.insert(0, "range", rows)
    order = ["process", "tid", "start_ns", "end_ns"]
    return ranges.sort_values(order, ascending=[True, True, True, False], ignore_index=True)


def _fields_of(label: Label | None) -> tuple[str, int, str, bool]:
    if label is None:
        return "", -1, "", False
    return str(label.phase), -1 if label.layer is None else label.layer, str(label.stage or ""), label.step


def step_spans(labels: pd.DataFrame) -> pd.DataFrame:
    """One row per step of `labelled` ranges: range (which opens the step), process, tid, start_ns, end_ns.

    Steps are the ranges "decode/step" and "prefill/step". On a thread without such ranges a step begins with its
    embedding, or, in a phase without embeddings, where the phase's first stage recurs. It ends where a decode step
    follows it, else with its last stage.
    """
    columns = ["range", "process", "tid", "start_ns", "end_ns"]
    parts = [labels.loc[labels["step"], columns]]
    for _, of_thread in labels.groupby(["process", "tid"]):
        if not of_thread["step"].any():
            parts.append(_derived(of_thread[of_thread["stage"] != ""])[columns])
    return pd.concat(parts, ignore_index=True)


def _derived(stages: pd.DataFrame) -> pd.DataFrame:
    """The steps of one thread that has ranges of stages but not of steps, in the order of time."""
    labels = stages[["phase", "layer", "stage"]]
    opens = stages["stage"] == Stage.EMBED
    for phase, of_phase in labels.groupby("phase"):
        if not opens[of_phase.index].any():
            opens |= (labels == labels.loc[of_phase.index[0]]).all(axis=1) & (labels["phase"] == phase)
    opens &= (labels != labels.shift()).any(axis=1)  # an embedding in two parts counts once
    last = stages["end_ns"].groupby(opens.cumsum()).max()
    steps = stages[opens]
    follows_ns = steps["start_ns"].shift(-1, fill_value=0)
    decodes = steps["phase"].shift(-1) == Phase.DECODE
    return steps.assign(end_ns=follows_ns.where(decodes, last.loc[1:].to_numpy()))
