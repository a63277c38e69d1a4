"""The cost of profiling: the times of a command under the profiler and without it."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import ConfigDict

from labkit.stages import Phase
from labkit.system.validation import Listed


class Tax(Listed):
    """The times of a run under the profiler and without it, in milliseconds.

    They are medians over the steps of `phase`, as labkit itself times them. For a program that announces no steps
    (phase None) they are wall times from start to end, which under nsys include nsys's own start and its export.
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
        unit = f"{self.phase} step" if self.phase else "whole run, the profiler's own start and end included"
        return f"{self.ratio - 1:+.0%} ({unit}: {self.profiled_ms:.4g} ms profiled, {self.plain_ms:.4g} ms without)"


def tax_of_steps(profiled: Path, plain: Path, phase: Phase | None) -> Tax | None:
    """The tax by the files of LABKIT_STEP_TIMES: of `phase`, by default of decode, else of prefill. None: no steps."""
    of_profiled, of_plain = _step_times(profiled), _step_times(plain)
    for timed in (phase,) if phase else (Phase.DECODE, Phase.PREFILL):
        if timed in of_profiled and timed in of_plain:
            return Tax(
                phase=timed,
                profiled_ms=median(of_profiled[timed]),
                plain_ms=median(of_plain[timed]),
                samples=(len(of_profiled[timed]), len(of_plain[timed])),
            )
    return None


def tax_of_runs(profiled_s: float, plain_s: float) -> Tax:
    """The tax by the wall times of two whole runs."""
    return Tax(phase=None, profiled_ms=profiled_s * 1e3, plain_ms=plain_s * 1e3, samples=(1, 1))


def count_steps(times: Path) -> int:
    """The number of steps that a run has timed."""
    return sum(map(len, _step_times(times).values()))


def count_forked(times: Path) -> int:
    """The number of processes of a run that were forked, which the profiler did not see."""
    return len({entry["forked"] for entry in _entries(times) if "forked" in entry})


def _step_times(path: Path) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {}
    for entry in _entries(path):
        if "phase" in entry:
            times.setdefault(entry["phase"], []).extend(entry["step_ms"])
    return times


def _entries(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
