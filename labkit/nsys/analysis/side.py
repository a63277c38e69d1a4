"""One side of a difference: the steps that count, and the parts of each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from labkit.nsys.analysis.attribution import Attribution, attribute
from labkit.nsys.analysis.steps import GPU, steps
from labkit.nsys.analysis.work import (
    NO_STAGE,
    OPERATIONS,
    OPERATORS,
    RANGES,
    StepWork,
    gpu_work,
    operator_work,
    stage_work,
)
from labkit.nsys.arrays import Floats, Ints
from labkit.nsys.trace import Source, Trace, TraceError
from labkit.stages import Phase
from labkit.statistics import OUTLIER_SAMPLES, outliers

SLOW_START = 1.25  # times the median of all steps


@dataclass(frozen=True)
class Captured:
    """A trace with its attribution and its steps."""

    name: str
    trace: Trace
    attribution: Attribution
    steps: pd.DataFrame

    @classmethod
    def of(cls, name: str, trace: Trace) -> Captured:
        attribution = attribute(trace)
        return cls(name, trace, attribution, steps(trace, attribution))

    @property
    def on_gpu(self) -> bool:
        return bool((self.steps["clock"] == GPU).all())

    @property
    def has_operators(self) -> bool:
        return bool((self.trace.calls["kind"] == "op").any())

    def work(self, phase: Phase, unit: str) -> StepWork:
        """The steps of a phase with their pieces of work. TraceError for a phase without steps."""
        chosen = self.steps[self.steps["phase"] == phase].reset_index(drop=True)
        if chosen.empty:
            counts = " and ".join(f"{n} of {name}" for name, n in self.steps["phase"].value_counts().items())
            raise TraceError(
                f"{self.name} has no step of {phase}, but {counts}; explain another phase, "
                f"or capture more: steps of {Phase.DECODE} begin with the second new token"
            )
        if unit == OPERATIONS:
            return gpu_work(self.trace, chosen, self.attribution)
        return operator_work(self.trace, chosen) if unit == OPERATORS else stage_work(self.trace, chosen)


@dataclass(frozen=True)
class Side:
    """The times of the steps of one side, one row per step in the order of time, averaged over the ranks.

    `stage_ms` holds the time of all pieces of a stage, communication included; time that only work of no step fills is
    under NO_STAGE. If the pieces are operators, it holds the time of the stage's ranges.
    """

    name: str
    source: Source
    coverage: float
    time_ms: Floats
    idle_ms: Floats
    exposed_ms: Floats
    count: pd.DataFrame  # number of pieces of work that compute, by layer and stage
    own_ms: pd.DataFrame  # time of these pieces
    stage_ms: pd.DataFrame
    remarks: tuple[str, ...]

    @property
    def steps(self) -> int:
        return len(self.time_ms)

    @property
    def mean_ms(self) -> float:
        return float(self.time_ms.mean())


def side(captured: Captured, phase: Phase, unit: str, *, keep_warm_up: bool = False) -> Side:
    """The side with the steps of a phase that count. It leaves out:

    - steps that some of the ranks lack;
    - steps with an unknown end (not `whole`), if at least two others remain;
    - unless `keep_warm_up`, warm-up: the first steps, as long as each takes over 1.25 times the median and, among ten
      steps or more, is an outlier (labkit.statistics). At most a quarter of the steps are warm-up, and none of fewer
      than three. Later outliers are part of what the program does, and stay.
    """
    step_work = captured.work(phase, unit)
    steps, pieces = step_work.steps, step_work.pieces
    ranks = steps.groupby(["process", "tid"]).ngroups
    used, remarks = _used(steps, ranks, captured.name, keep_warm_up=keep_warm_up)
    number = steps["index"].to_numpy()

    def per_step(values: pd.Series) -> Floats:
        return values.groupby(number).sum().reindex(used).to_numpy(np.float64) / ranks

    def table(rows: pd.DataFrame, keys: list[str], aggregate: str) -> pd.DataFrame:
        grouped = rows.assign(index=number[rows["step"]]).groupby(["index", *keys])["own_ns"].agg(aggregate)
        return grouped.unstack(keys, fill_value=0).reindex(used, fill_value=0) / ranks

    of_steps = pieces.groupby("step")[["exposed_ns", "new_ns"]].sum().reindex(range(len(steps)), fill_value=0)
    if unit == OPERATORS:
        stage_ms = table(captured.work(phase, RANGES).pieces, ["stage"], "sum") / 1e6
    else:
        stage_ms = table(pieces, ["stage"], "sum") / 1e6
        others = per_step(steps["duration_ns"] - steps["idle_ns"] - of_steps["new_ns"]) / 1e6
        if others.any():
            stage_ms[NO_STAGE] = others + stage_ms.get(NO_STAGE, 0.0)
    computing = pieces[~pieces["communication"]]
    return Side(
        name=captured.name,
        source=captured.trace.source,
        coverage=captured.attribution.coverage,
        time_ms=per_step(steps["duration_ns"]) / 1e6,
        idle_ms=per_step(steps["idle_ns"]) / 1e6,
        exposed_ms=per_step(of_steps["exposed_ns"]) / 1e6,
        count=table(computing, ["layer", "stage"], "size"),
        own_ms=table(computing, ["layer", "stage"], "sum") / 1e6,
        stage_ms=stage_ms,
        remarks=tuple(remarks),
    )


def _used(steps: pd.DataFrame, ranks: int, name: str, *, keep_warm_up: bool) -> tuple[Ints, list[str]]:
    """The indices of the steps that count, by the rules of `side`, and remarks on the other steps."""
    of_index = steps.groupby("index").agg(
        ranks=("whole", "size"), whole=("whole", "all"), duration_ns=("duration_ns", "mean")
    )
    of_index = of_index[of_index["ranks"] == ranks]
    if of_index["whole"].sum() >= 2:
        of_index = of_index[of_index["whole"]]
    time_ms = of_index["duration_ns"].to_numpy() / 1e6
    remarks = [f"{name}: mean of {ranks} ranks"] if ranks > 1 else []
    warm = 0 if keep_warm_up else warm_up(time_ms)
    if warm:
        remarks.append(f"{name}: {warm_up_in_words(time_ms, warm)}, left out")
    late = int(outliers(list(time_ms[warm:])).sum()) if len(time_ms) - warm >= OUTLIER_SAMPLES else 0
    if late:
        remarks.append(f"{name}: {late} of {len(time_ms) - warm} steps are outliers, kept")
    return of_index.index.to_numpy(np.int64)[warm:], remarks


def warm_up(time_ms: Floats) -> int:
    """The number of first steps that are warm-up, by the rule of `side`."""
    if len(time_ms) < 3:
        return 0
    slow = time_ms > SLOW_START * np.median(time_ms)
    if len(time_ms) >= OUTLIER_SAMPLES:
        slow &= outliers(list(time_ms))
    most = max(1, len(time_ms) // 4)
    return int(np.append(slow[:most], False).argmin())


def warm_up_in_words(time_ms: Floats, count: int) -> str:
    """The steps that `warm_up` counted, with the median of all steps."""
    which = "the first step" if count == 1 else f"the first {count} steps"
    took = ", ".join(f"{ms:.2f}" for ms in time_ms[:count])
    return f"{which} of {len(time_ms)} ({took} ms; the median is {np.median(time_ms):.2f} ms) as warm-up"
