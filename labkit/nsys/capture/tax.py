"""What being profiled costs: the same command, once under the profiler and once without."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import ConfigDict

from labkit.stages import Phase
from labkit.system.validation import Listed


class Tax(Listed):
    """Medians over the steps of `phase` as labkit times them itself, in milliseconds, or, of a program that announces
    no steps, wall times from start to end (phase None): under nsys with nsys's own start and its export.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    phase: Phase | None
    profiled_ms: float
    plain_ms: float
    samples: tuple[int, int]  # profiled, plain

    @property
    def ratio(self) -> float:
        """1.25: a step takes a quarter longer under the profiler."""
        return self.profiled_ms / self.plain_ms

    def __str__(self) -> str:
        what = f"{self.phase} step" if self.phase else "whole run, the profiler's own start and end included"
        return f"{self.ratio - 1:+.0%} ({what}: {self.profiled_ms:.4g} ms profiled, {self.plain_ms:.4g} ms without)"


def tax_of_steps(profiled: Path, plain: Path, phase: Phase | None) -> Tax | None:
    """From the files that LABKIT_STEP_TIMES named; of `phase`, or else of decode, or of prefill. None without steps."""
    of_profiled, of_plain = _step_times(profiled), _step_times(plain)
    for each in (phase,) if phase else (Phase.DECODE, Phase.PREFILL):
        if each in of_profiled and each in of_plain:
            return Tax(
                phase=each,
                profiled_ms=median(of_profiled[each]),
                plain_ms=median(of_plain[each]),
                samples=(len(of_profiled[each]), len(of_plain[each])),
            )
    return None


def tax_of_runs(profiled_s: float, plain_s: float) -> Tax:
    """From the wall times of two whole runs."""
    return Tax(phase=None, profiled_ms=profiled_s * 1e3, plain_ms=plain_s * 1e3, samples=(1, 1))


def count_steps(times: Path) -> int:
    """How many steps a run has timed."""
    return sum(map(len, _step_times(times).values()))


def count_forked(times: Path) -> int:
    """How many processes of a run were forked, so that the profiler did not see them."""
    return len({entry["forked"] for entry in _entries(times) if "forked" in entry})


def _step_times(path: Path) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {}
    for entry in _entries(path):
        if "phase" in entry:
            times.setdefault(entry["phase"], []).extend(entry["step_ms"])
    return times


def _entries(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
