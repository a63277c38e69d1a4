"""Why one capture's steps are faster than another's: the difference of the mean step, split into parts that add up."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from labkit.nsys.analysis.alignment import align
from labkit.nsys.analysis.decomposition import Split, StepPart
from labkit.nsys.analysis.resampling import Resampled, resampled
from labkit.nsys.analysis.side import Captured, Side, side
from labkit.nsys.analysis.stage_table import IDLE
from labkit.nsys.analysis.work import OPERATIONS, OPERATORS, RANGES
from labkit.nsys.trace import Trace, TraceError
from labkit.stages import Phase
from labkit.statistics import CONFIDENCE, INDIFFERENCE, LARGEST_SAME, Verdict, noise_floor

STEPS_NEEDED = 5  # a side, for a verdict; an interval takes 2
OVERLAP = "overlap"
NOTHING_MS = 1e-9
SMALL = 0.02  # parts below this share of the larger step are not worth a word
ONE_CAPTURE = (
    "one capture of each side: the intervals do not cover how much a side varies from run to run, and a profiled run "
    "is slower than an unprofiled one; `labkit compare` compares the two sides as they are"
)


@dataclass(frozen=True)
class Interval:
    """A difference and its 95 % interval over steps, which is NaN with fewer than two steps a side."""

    ms: float
    low_ms: float
    high_ms: float


@dataclass(frozen=True)
class Difference:
    """vanilla - fused, in ms of a mean step: positive where fused is faster.

    Columns of `parts`: name (for this difference), ms, low_ms, high_ms, note. The ms add up to `step.ms`.
    Columns of `by_stage`: vanilla_ms, fused_ms, ms, low_ms, high_ms, verdict. Its rows are the stages, NO_STAGE, IDLE
    and OVERLAP (negative: time in which several pieces ran). The ms columns add up to the two steps and their
    difference. All verdicts hold at once: their intervals are wider than the ones shown (Bonferroni).
    """

    vanilla: Side
    fused: Side
    phase: Phase
    unit: str  # what was compared: "GPU operations", "operators" or "ranges of stages"
    step: Interval
    noise_ms: float  # by which the steps of a side differ among themselves; at least 1 %
    verdict: Verdict
    parts: pd.DataFrame
    by_stage: pd.DataFrame
    remarks: tuple[str, ...]

    @property
    def places(self) -> int:
        """Decimals that give a step three digits."""
        return max(0, 2 - math.floor(math.log10(max(self.vanilla.mean_ms, self.fused.mean_ms, 1e-6))))

    @property
    def claim(self) -> str:
        """The verdict in words, with the interval."""
        vanilla, fused = self.vanilla.name, self.fused.name
        match self.verdict:
            case Verdict.UNDECIDED:
                amount = self._interval(self.step.ms, self.step.low_ms, self.step.high_ms, "+")
                return f"undecided: {vanilla} - {fused} is {amount} per {self.phase} step"
            case Verdict.SAME:
                amount = self._interval(self.step.ms, self.step.low_ms, self.step.high_ms, "+")
                return f"{fused} takes as long as {vanilla}: the difference is {amount} per {self.phase} step"
            case Verdict.SLOWER:
                amount = self._interval(-self.step.ms, -self.step.high_ms, -self.step.low_ms)
            case _:
                amount = self._interval(self.step.ms, self.step.low_ms, self.step.high_ms)
        return f"{fused} is {self.verdict.lower()} than {vanilla} by {amount} per {self.phase} step"

    @property
    def headline(self) -> str:
        """The claim, and the parts that matter."""
        least = SMALL * max(self.vanilla.mean_ms, self.fused.mean_ms)
        parts = self.shown_parts.sort_values("ms", key=abs, ascending=False)
        words = [
            f"{row.name} {'saved' if row.ms > 0 else 'cost'} {abs(row.ms):.{self.places}f}"
            for row in parts.itertuples()
            if abs(row.ms) > least
        ]
        return f"{self.claim}{': ' if words else ''}{', '.join(words)}"

    @property
    def shown_parts(self) -> pd.DataFrame:
        """The parts with a time, an interval or a note. Other parts play no role in this difference."""
        nothing = self.parts[["ms", "low_ms", "high_ms"]].abs().max(axis=1).lt(NOTHING_MS) & self.parts["note"].eq("")
        return self.parts[~nothing]

    def text(self) -> str:
        """The headline, the sum of the parts, and the remarks to read before trusting it."""
        width = max(len(name) for name in [self.vanilla.name, self.fused.name, *self.parts["name"]])
        lines = [self.headline, "", f"{self.vanilla.name:<{width}}  {self.vanilla.mean_ms:9.{self.places}f} ms"]
        for row in self.shown_parts.itertuples():
            amount = self._interval(-row.ms, -row.high_ms, -row.low_ms, "+", width=9)
            lines.append(f"{row.name:<{width}}  {amount}  {row.note}".rstrip())
        lines.append(f"{self.fused.name:<{width}}  {self.fused.mean_ms:9.{self.places}f} ms")
        return "\n".join([*lines, "", *(f"- {remark}" for remark in self.remarks)])

    def _interval(self, ms: float, low_ms: float, high_ms: float, sign: str = "", width: int = 0) -> str:
        value = f"{ms:{sign}z{width or ''}.{self.places}f} ms"
        if math.isnan(low_ms):
            return f"{value} [no interval]"
        return f"{value} [{low_ms:{sign}z.{self.places}f}, {high_ms:{sign}z.{self.places}f}]"


def explain(
    vanilla: Trace,
    fused: Trace,
    phase: Phase = Phase.DECODE,
    *,
    names: tuple[str, str] = ("vanilla", "fused"),
    keep_warm_up: bool = False,
) -> Difference:
    """Splits the difference of the mean steps of a phase into parts.

    `labkit.nsys.analysis.side.side` says which steps count. The pieces that are compared are GPU operations; on CPUs
    they are operators of PyTorch if both captures have them, else ranges of stages. TraceError where a capture has no
    range of labkit or no step of the phase, where only one is of a GPU, and where they share no stage.
    """
    both = Captured.of(names[0], vanilla), Captured.of(names[1], fused)
    if both[0].on_gpu != both[1].on_gpu:
        gpu, cpu = both if both[0].on_gpu else both[::-1]
        raise TraceError(
            f"the steps of {gpu.name} are timed on the GPU, the steps of {cpu.name} on the CPU (no GPU operation "
            "belongs to them); expected the same clock: capture both runs on the same device, with the same options"
        )
    unit = OPERATIONS if both[0].on_gpu else OPERATORS if all(captured.has_operators for captured in both) else RANGES
    of_vanilla, of_fused = (side(captured, phase, unit, keep_warm_up=keep_warm_up) for captured in both)
    aligned = align(of_vanilla, of_fused)
    split = Split(of_vanilla, of_fused, aligned, unit)
    estimates = resampled(split.steps[0], split.steps[1], split.quantities)
    low, high = estimates.interval()
    enough = min(of_vanilla.steps, of_fused.steps) >= STEPS_NEEDED
    noises = [noise_floor(list(one_side.time_ms)) for one_side in (of_vanilla, of_fused) if one_side.steps > 1]
    noise = max([INDIFFERENCE, *noises])
    step = Interval(*(float(values[0]) for values in (estimates.estimate, low, high)))
    result = Difference(
        vanilla=of_vanilla,
        fused=of_fused,
        phase=phase,
        unit=unit,
        step=step,
        noise_ms=noise * of_vanilla.mean_ms,
        verdict=_verdict(step.low_ms, step.high_ms, noise, of_vanilla.mean_ms) if enough else Verdict.UNDECIDED,
        parts=pd.DataFrame({"name": list(split.names())}, index=pd.Index(list(StepPart), name="part")),
        by_stage=_by_stage(split, estimates, [*aligned.stages, IDLE, OVERLAP], enough),
        remarks=tuple(_remarks(of_vanilla, of_fused, unit)),
    )
    count = 1 + len(StepPart)
    columns = {"ms": estimates.estimate[1:count], "low_ms": low[1:count], "high_ms": high[1:count]}
    return replace(result, parts=result.parts.assign(**columns, note=list(split.notes(result.places))))


def _by_stage(split: Split, estimates: Resampled, names: list[str], enough: bool) -> pd.DataFrame:
    first = 1 + len(StepPart)
    low, high = (ends[first:] for ends in estimates.interval())
    corrected = estimates.interval(1 - (1 - CONFIDENCE) / len(names))
    vanilla_ms, fused_ms = (split.by_stage(mean) for mean in split.means)
    whole = np.maximum(abs(vanilla_ms), abs(fused_ms))
    verdicts = [
        _verdict(*ends, INDIFFERENCE, most) if enough else Verdict.UNDECIDED
        for ends, most in zip(zip(corrected[0][first:], corrected[1][first:], strict=True), whole, strict=True)
    ]
    columns = {"vanilla_ms": vanilla_ms, "fused_ms": fused_ms, "ms": estimates.estimate[first:]}
    frame = pd.DataFrame(
        {**columns, "low_ms": low, "high_ms": high, "verdict": verdicts}, index=pd.Index(names, name="stage")
    )
    return (
        frame if abs(frame.loc[OVERLAP, ["vanilla_ms", "fused_ms"]]).max() > NOTHING_MS else frame.drop(index=OVERLAP)
    )


def _verdict(low_ms: float, high_ms: float, noise: float, whole_ms: float) -> Verdict:
    """The verdict on an interval, for a noise that is a fraction of the whole.

    FASTER or SLOWER where the interval lies beyond the noise, SAME where it lies within the noise and within 5 %, else
    UNDECIDED, also without an interval.
    """
    if low_ms > noise * whole_ms:
        return Verdict.FASTER
    if high_ms < -noise * whole_ms:
        return Verdict.SLOWER
    same_ms = min(noise, LARGEST_SAME) * whole_ms
    return Verdict.SAME if -same_ms <= low_ms and high_ms <= same_ms else Verdict.UNDECIDED


def _remarks(vanilla: Side, fused: Side, unit: str) -> list[str]:
    sides = (vanilla, fused)
    whole = "GPU time" if unit == OPERATIONS else "steps' time"
    shares = " and ".join(f"{one_side.coverage:.0%} of {one_side.name}'s {whole}" for one_side in sides)
    remarks = [f"{shares} belongs to a stage", *vanilla.remarks, *fused.remarks]
    for one_side in sides:
        if one_side.steps < STEPS_NEEDED:
            has = f"{one_side.steps} steps that count" if one_side.steps > 1 else "one step that counts"
            remarks.append(
                f"{one_side.name} has {has}; an interval needs 2 a side, a verdict {STEPS_NEEDED}: capture more steps"
            )
        remarks += [f"{one_side.name}: {line}" for line in one_side.source.skipped]
    return [*remarks, ONE_CAPTURE]
