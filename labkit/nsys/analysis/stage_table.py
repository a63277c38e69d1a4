"""The time of steps by phase, layer and stage, with idle time and work that belongs to no stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from labkit.nsys.analysis.attribution import attribute
from labkit.nsys.analysis.intervals import fresh_start_ns
from labkit.nsys.analysis.side import warm_up, warm_up_in_words
from labkit.nsys.analysis.steps import GPU, steps
from labkit.nsys.analysis.work import NO_STAGE, StepWork, busy_times, outer_operators, work
from labkit.nsys.arrays import Ints
from labkit.nsys.trace import Source, Trace
from labkit.stages import Phase, Stage
from labkit.statistics import P95_SAMPLES
from labkit.system.asked_from import given
from labkit.system.errors import UserError
from labkit.system.result_table import ResultTable, Tabular

IDLE = "idle"
SCOPE = ("rank", "process", "phase")  # shares add up to 1 within each combination of the scopes in `by`
KEYS = (*SCOPE, "layer", "stage")
ORDER = {name: place for place, name in enumerate([*(str(stage) for stage in Stage), NO_STAGE, IDLE])}
PHASES = {str(phase): place for place, phase in enumerate(Phase)}
NO_NODES = "CUDA graphs were traced whole, so their time has no stage; capture with --cuda-graph-trace=node"

COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {  # by title: the column of the frame, and its format
    "runs": ("count", "{:,.0f}".format),
    "ms a step": ("step_ms", "{:.3f}".format),
    "share": ("share", "{:.1%}".format),
    "median µs": ("median_ms", lambda ms: f"{ms * 1e3:,.1f}"),
    "P95 µs": ("p95_ms", lambda ms: f"{ms * 1e3:,.1f}"),
    "ops": ("operations", "{:,.1f}".format),
    "GPU busy ms": ("gpu_busy_ms", "{:,.3f}".format),
    "gaps ms": ("launch_gap_ms", "{:,.3f}".format),
    "exposed ms": ("exposed_ms", "{:,.3f}".format),
}
PER_STEP = ("ops", "GPU busy ms", "gaps ms", "exposed ms")


@dataclass(frozen=True, repr=False)
class StageTable(Tabular):
    """The stages of the steps of a trace.

    `frame` has one row per combination of `by`, and for each scope one row IDLE and one NO_STAGE. Its columns:

    - `by`; layer is <NA> outside the layers;
    - count: the number of runs of the stage;
    - total_ms, median_ms, p95_ms: of its runs; enough_for_p95: False for fewer than 59 runs;
    - operations: GPU operations per step (on a CPU: operators of PyTorch that no other one called, if recorded);
    - gpu_busy_ms: per step, the part of its runs that its operations cover;
    - launch_gap_ms: per step, the part of its runs in which the GPU did nothing;
    - exposed_ms: per step, communication while the GPU computed nothing (on a CPU: all communication);
    - step_ms, share: its part of a mean step. Time in which operations overlap counts for the first to begin. Within a
      scope step_ms adds up to the mean step, share to 1.

    On a GPU a run of a stage lasts from its first operation's start to its last one's end. On a CPU it lasts as long as
    its range without the ranges of stages in it. IDLE and NO_STAGE have one run per step. On a CPU the two GPU columns
    are NaN, IDLE is the time outside all stages, and there is no row NO_STAGE.
    """

    frame: pd.DataFrame
    by: tuple[str, ...]
    step_count: dict[str, int]  # by phase
    coverage: float  # share of the GPU's time (on a CPU: of the steps' time) that belongs to a stage
    clock: str  # "GPU" or "CPU"
    source: Source
    remarks: tuple[str, ...]

    def to_frame(self) -> pd.DataFrame:
        """A copy of `frame`."""
        return self.frame.copy()

    def table(self) -> ResultTable:
        """The columns that are not empty, with a note on the share of the time that has a stage."""
        shown = {title: column for title, column in COLUMNS.items() if self.frame[column[0]].any()}
        per_step = [title for title in PER_STEP if title in shown]
        return ResultTable(
            title="",
            columns=(*self.by, *shown),
            rows=tuple(
                (
                    *("" if row[key] is pd.NA else str(row[key]) for key in self.by),
                    *(form(row[name]) for name, form in shown.values()),
                )
                for row in self.frame.to_dict("records")
            ),
            notes=(
                *([f"{', '.join(per_step)}: of a step, as ms a step"] if per_step else []),
                f"{self.coverage:.1%} of the {self.clock}'s time has a stage",
            ),
            names=len(self.by),
        )


def stage_table(trace: Trace, by: Sequence[str] = ("phase", "layer", "stage")) -> StageTable:
    """The stages of all steps of a trace. `by`: "stage" and any of "phase", "layer", "rank", "process", in this order.

    Ranks are averaged unless `by` tells them apart. TraceError where the trace has no range of labkit.
    """
    if "stage" not in by or set(by) - set(KEYS) or len(set(by)) != len(by):
        raise UserError(f"got {given('by', ','.join(by))}; expected stage and any of {', '.join(KEYS[:-1])}, each once")
    attribution = attribute(trace)
    step_work = work(trace, steps(trace, attribution), attribution)
    on_gpu = bool((step_work.steps["clock"] == GPU).all())
    runs = pd.concat([_runs(trace, step_work, on_gpu), _rest(step_work)], ignore_index=True)
    step_columns = step_work.steps[["rank", "process", "phase"]].iloc[runs["step"]].reset_index(drop=True)
    runs = pd.concat([runs, step_columns], axis=1)
    scope = [name for name in by if name in SCOPE]
    frame = _summarised(runs, list(by))
    durations = step_work.steps.assign(all="").groupby(scope or ["all"])["duration_ns"]
    scopes = durations.agg(steps="count", steps_ns="sum").reset_index()
    frame = frame.merge(scopes, on=scope) if scope else frame.join(scopes[["steps", "steps_ns"]], how="cross")
    for name in ("operations", "gpu_busy_ms", "launch_gap_ms", "exposed_ms"):
        frame[name] = frame[name] / frame["steps"]
    frame["step_ms"] = frame["new_ns"] / frame["steps"] / 1e6
    frame["share"] = frame["new_ns"] / frame["steps_ns"]
    if not on_gpu:
        frame[["gpu_busy_ms", "launch_gap_ms"]] = np.nan
        frame = frame[frame["stage"] != NO_STAGE]
    columns = [
        "runs",
        "total_ms",
        "median_ms",
        "p95_ms",
        "enough_for_p95",
        "operations",
        "gpu_busy_ms",
        "launch_gap_ms",
    ]
    frame = frame[[*by, *columns, "exposed_ms", "step_ms", "share"]].rename(columns={"runs": "count"})
    return StageTable(
        frame=_sorted(frame, list(by)),
        by=tuple(by),
        step_count=step_work.steps["phase"].value_counts().to_dict(),
        coverage=attribution.coverage,
        clock=GPU if on_gpu else "CPU",
        source=trace.source,
        remarks=tuple(_remarks(trace, step_work, attribution.coverage, by)),
    )


def _runs(trace: Trace, step_work: StepWork, on_gpu: bool) -> pd.DataFrame:
    """One row per run of a stage in a step."""
    pieces = step_work.pieces[step_work.pieces["stage"] != NO_STAGE]
    pieces = pieces.assign(
        process=step_work.steps["process"].to_numpy()[pieces["step"]],
        busy_ns=pieces["end_ns"] - fresh_start_ns(*_columns(pieces, "start_ns", "end_ns", "instance")),
    )
    runs = pieces.groupby(["step", "instance", "layer", "stage"], as_index=False).agg(
        process=("process", "first"),
        start_ns=("start_ns", "min"),
        end_ns=("end_ns", "max"),
        duration_ns=("own_ns", "sum"),
        operations=("own_ns", "size"),
        busy_ns=("busy_ns", "sum"),
        new_ns=("new_ns", "sum"),
        exposed_ns=("exposed_ns", "sum"),
    )
    runs["gap_ns"] = 0
    if not on_gpu:
        operators = outer_operators(trace, step_work.steps)
        runs["operations"] = operators["instance"].value_counts().reindex(runs["instance"]).fillna(0).to_numpy()
    else:
        runs["duration_ns"] = runs["end_ns"] - runs["start_ns"]
        for process, union in busy_times(trace).items():
            of_process = (runs["process"] == process).to_numpy()
            spans = runs[of_process]
            runs.loc[of_process, "gap_ns"] = spans["duration_ns"] - union.covered_ns(
                *_columns(spans, "start_ns", "end_ns")
            )
    return runs.drop(columns=["process", "start_ns", "end_ns", "instance"])


def _columns(frame: pd.DataFrame, *names: str) -> list[Ints]:
    return [frame[name].to_numpy(np.int64) for name in names]


def _rest(step_work: StepWork) -> pd.DataFrame:
    """For each step, as runs: the time in which nothing ran, and the time of work that belongs to no stage."""
    count = len(step_work.steps)
    pieces, idle = step_work.pieces, step_work.steps["idle_ns"].to_numpy()
    of_stage = (pieces["stage"] != NO_STAGE).to_numpy()
    step = pieces["step"].to_numpy(np.int64)
    in_stages = np.bincount(step[of_stage], pieces["new_ns"].to_numpy()[of_stage], count).astype(np.int64)
    rest = step_work.steps["duration_ns"].to_numpy() - idle - in_stages
    sizes = np.bincount(step[~of_stage], minlength=count)
    exposed = np.bincount(step[~of_stage], pieces["exposed_ns"].to_numpy()[~of_stage], count).astype(np.int64)
    rows = {
        IDLE: {"duration_ns": idle, "new_ns": idle},
        NO_STAGE: {"duration_ns": rest, "new_ns": rest, "busy_ns": rest, "operations": sizes, "exposed_ns": exposed},
    }
    zeros = dict.fromkeys(("operations", "busy_ns", "gap_ns", "exposed_ns"), 0)
    frames = [
        pd.DataFrame({**zeros, **columns, "step": np.arange(count), "layer": -1, "stage": stage})
        for stage, columns in rows.items()
    ]
    return pd.concat(frames)


def _summarised(runs: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    groups = runs.groupby(by)
    frame = groups.agg(
        runs=("step", "size"),
        total_ms=("duration_ns", "sum"),
        median_ms=("duration_ns", "median"),
        gpu_busy_ms=("busy_ns", "sum"),
        launch_gap_ms=("gap_ns", "sum"),
        exposed_ms=("exposed_ns", "sum"),
        operations=("operations", "sum"),
        new_ns=("new_ns", "sum"),
    )
    frame["p95_ms"] = groups["duration_ns"].quantile(0.95)
    frame[[name for name in frame if name.endswith("_ms")]] /= 1e6
    frame["enough_for_p95"] = frame["runs"] >= P95_SAMPLES
    return frame.reset_index()


def _sorted(frame: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """The rows in the order of a step: layer by layer, then the stages after the layers, then NO_STAGE and IDLE."""
    place = frame["stage"].map(ORDER)
    keys = {name: frame[name].map(PHASES) if name == "phase" else frame[name] for name in by}
    keys["stage"] = place
    if "layer" in by:
        after = frame["stage"].isin([Stage.LM_HEAD, Stage.SAMPLE, NO_STAGE, IDLE])
        keys["layer"] = frame["layer"].where(~(after & frame["layer"].eq(-1)), np.iinfo(np.int64).max)
        frame = frame.assign(layer=frame["layer"].astype("Int64").replace(-1, pd.NA))
    order = pd.DataFrame(keys).sort_values(by).index
    return frame.loc[order].reset_index(drop=True)


def _remarks(trace: Trace, step_work: StepWork, coverage: float, by: Sequence[str]) -> list[str]:
    remarks = list(trace.source.skipped)
    if len(trace.operations) and not (step_work.steps["clock"] == GPU).all():
        remarks.append("no GPU operation belongs to a step, so the times are the CPU's")
    if (trace.operations["kind"] == "graph").any():
        remarks.append(NO_NODES)
    ranks = (
        step_work.steps["rank"].nunique()
        if step_work.steps["rank"].ge(0).all()
        else step_work.steps["process"].nunique()
    )
    if ranks > 1 and not {"rank", "process"} & set(by):
        remarks.append(f"mean of {ranks} ranks; group by rank to tell them apart")
    for keys, of_lane in step_work.steps.groupby(["process", "tid", "phase"]):
        times_ms = of_lane["duration_ns"].to_numpy() / 1e6
        if count := warm_up(times_ms):
            remarks.append(f"{keys[2]}: {warm_up_in_words(times_ms, count)}, and counted")
    if coverage < 0.9:
        remarks.append(f"only {coverage:.0%} of the time belongs to a stage")
    return remarks
