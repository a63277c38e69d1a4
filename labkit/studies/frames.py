"""Frames of records, for figures and tables."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from labkit.stages import OUTSIDE, Phase, Stage

if TYPE_CHECKING:
    import pandas as pd

    from labkit.harness import Comparison, Measurement


def sides(comparison: Comparison) -> dict[str, Measurement]:
    """Both sides by their role, which decides their colour."""
    return {"baseline": comparison.baseline, "candidate": comparison.candidate}


def names(comparison: Comparison) -> dict[str, str]:
    """The name of each side in a figure, with its role when a side is compared with itself."""
    by_role = {role: side.name for role, side in sides(comparison).items()}
    return by_role if len(set(by_role.values())) == 2 else {role: f"{name} ({role})" for role, name in by_role.items()}


def number(value: float, digits: int = 3) -> str:
    """`value` with `digits` significant digits, never with an exponent: "0.0412", "3.14", "12,345"."""
    if value == 0:
        return "0"
    places = max(digits - 1 - math.floor(math.log10(abs(value))), 0)
    return f"{value:,.{places}f}"


@dataclass(frozen=True)
class Limit:
    """The least time of a decode step that the memory allows."""

    megabytes: float
    bandwidth_gb_s: float
    floor_ms: float


def limit(comparison: Comparison) -> Limit | None:
    """The physical limit at the bandwidth probed between the runs; None when bytes or bandwidth are unknown."""
    work, bandwidth = comparison.candidate.work, comparison.read_bandwidth_gb_s
    if work is None or bandwidth is None:
        return None
    return Limit(work.decode_bytes / 1e6, bandwidth, work.floor_ms(bandwidth))


def stage_frame(comparison: Comparison, phase: Phase = Phase.DECODE) -> pd.DataFrame:
    """Milliseconds per forward pass by stage, in the order of a step; columns `baseline` and `candidate`.

    Times are sums over all layers. In decode they are the mean over the steps of the run that collected the stages, and
    the last row, OUTSIDE, is the time that no stage covers. A stage that one side does not time alone is 0 for that
    side; a side without stages has only zeros.
    """
    import pandas as pd

    columns = {role: _pass_ms(side, phase) for role, side in sides(comparison).items()}
    stages = [stage for stage in (*Stage, OUTSIDE) if any(stage in column for column in columns.values())]
    values = {role: [column.get(stage, 0.0) for stage in stages] for role, column in columns.items()}
    return pd.DataFrame(values, index=pd.Index([str(stage) for stage in stages], name="stage"), dtype=float)


def _pass_ms(side: Measurement, phase: Phase) -> dict[str, float]:
    if side.stage_run is None:
        return {}
    steps_ms = side.stage_run.decode_ms
    passes = len(steps_ms) if phase is Phase.DECODE else 1
    total: dict[str, float] = {}
    for time in side.stages:
        if time.phase == phase:
            stage = Stage(time.stage)
            total[stage] = total.get(stage, 0.0) + time.total_ms / passes
    if phase is Phase.DECODE and total:
        rest = OUTSIDE if Stage.SAMPLE in total else Stage.SAMPLE  # older records did not time SAMPLE
        total[rest] = max(sum(steps_ms) / passes - sum(total.values()), 0.0)
    return total


def share_words(share: float | None) -> str:
    """A share of the physical limit as a percentage."""
    return "unknown" if share is None else f"{share:.0%}"
