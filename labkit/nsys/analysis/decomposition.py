"""The difference of two mean steps as a sum of parts, which is exact for any steps."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

import numpy as np

from labkit.nsys.analysis.alignment import Aligned
from labkit.nsys.analysis.side import Side
from labkit.nsys.analysis.work import OPERATIONS, OPERATORS, RANGES
from labkit.nsys.arrays import Floats

NOUN = {OPERATIONS: "kernels", OPERATORS: "operators", RANGES: "stages"}


class StepPart(StrEnum):
    """A part of the time by which fused's step is shorter than vanilla's; negative where it is longer.

    REMOVED, ADDED and FASTER count pieces of work that compute. Let a step have n pieces in a stage, of m ms each. If
    fused has fewer, (n_vanilla - n_fused) * m_vanilla is REMOVED and n_fused * (m_vanilla - m_fused) is FASTER. If
    fused has more, (n_vanilla - n_fused) * m_fused is ADDED and n_vanilla * (m_vanilla - m_fused) is FASTER.
    """

    REMOVED = "removed"
    ADDED = "added"
    FASTER = "faster"
    GAPS = "gaps"  # nothing runs: launches, waiting, the CPU's own work
    COMMUNICATION = "communication"  # while nothing is computed
    UNEXPLAINED = "unexplained"  # work of no stage, less the time in which several pieces of work run


class Split:
    """Splits mean steps into parts. A mean step is a vector of features; many mean steps are columns of a matrix."""

    def __init__(self, vanilla: Side, fused: Side, aligned: Aligned, unit: str) -> None:
        self.steps = tuple(
            np.column_stack([side.time_ms, side.idle_ms, side.exposed_ms, count, own_ms, stage_ms])
            for side, count, own_ms, stage_ms in zip(
                (vanilla, fused), aligned.count, aligned.own_ms, aligned.stage_ms, strict=True
            )
        )
        self.unit, self._keys = unit, len(aligned.keys)
        self.means = tuple(rows.mean(axis=0) for rows in self.steps)
        counts = [self._parts_of(mean)[3] for mean in self.means]
        self.fewer, self.more = counts[0] > counts[1], counts[0] < counts[1]

    def quantities(self, vanilla: Floats, fused: Floats) -> Floats:
        """Differences of the step, each part in order, and each row of `by_stage`. The parts add up to the step."""
        time, idle, exposed, *_ = (a - b for a, b in zip(self._parts_of(vanilla), self._parts_of(fused), strict=True))
        removed, faster = self._by_key(vanilla, fused)
        parts = [removed[self.fewer].sum(axis=0), removed[~self.fewer].sum(axis=0), faster.sum(axis=0), idle, exposed]
        rows = self.by_stage(vanilla) - self.by_stage(fused)
        return np.stack([time, *parts, time - sum(parts), *rows])

    def by_stage(self, mean: Floats) -> Floats:
        """The ms of a mean step by stage, idle time and overlap (negative), in rows that add up to the step."""
        time, idle, _, _, _, stage_ms = self._parts_of(mean)
        if self.unit == OPERATORS:  # then stages hold the gaps between their operators
            idle = time - stage_ms.sum(axis=0)
        return np.stack([*stage_ms, idle, time - idle - stage_ms.sum(axis=0)])

    def _parts_of(self, mean: Floats) -> tuple[Floats, ...]:
        count, own = mean[3 : 3 + self._keys], mean[3 + self._keys : 3 + 2 * self._keys]
        return mean[0], mean[1], mean[2], count, own, mean[3 + 2 * self._keys :]

    def _by_key(self, vanilla: Floats, fused: Floats) -> tuple[Floats, Floats]:
        """By key, the ms that fused saves, in two parts: by fewer pieces (negative: more pieces) and by faster ones."""
        (*_, n_vanilla, own_vanilla, _), (*_, n_fused, own_fused, _) = self._parts_of(vanilla), self._parts_of(fused)
        vanilla_each = own_vanilla / np.where(n_vanilla > 0, n_vanilla, 1)
        fused_each = own_fused / np.where(n_fused > 0, n_fused, 1)
        removed = (n_vanilla - n_fused) * np.where(n_vanilla >= n_fused, vanilla_each, fused_each)
        return removed, own_vanilla - own_fused - removed

    def names(self) -> Iterator[str]:
        """The name of each part of this difference."""
        noun, faster = NOUN[self.unit], self.quantities(*self.means)[1 + list(StepPart).index(StepPart.FASTER)]
        yield f"removed {noun}"
        yield f"added {noun}"
        yield f"{'faster' if faster >= 0 else 'slower'} {noun}"
        yield "gaps and launches" if self.unit == OPERATIONS else f"gaps between {noun}"
        yield "communication"
        yield "unexplained"

    def notes(self, places: int) -> Iterator[str]:
        """For each StepPart, in words, the figures of both sides whose difference it is."""
        (time_v, idle_v, exposed_v, n_v, own_v, _), (time_f, idle_f, exposed_f, n_f, own_f, _) = map(
            self._parts_of, self.means
        )

        def change(before: float, after: float, noun: str) -> str:
            return (
                f"{before:z.{places}f} → {after:z.{places}f} ms {noun}" if max(abs(before), abs(after)) > 1e-9 else ""
            )

        for chosen in (self.fewer, self.more):
            yield f"{n_v[chosen].sum():.5g} → {n_f[chosen].sum():.5g} a step" if chosen.any() else ""
        both = (n_v > 0) & (n_f > 0)
        growth = own_f[both].sum() * n_v[both].sum() / max(own_v[both].sum() * n_f[both].sum(), 1e-12)
        work = ", each of which does more" if self.fewer.any() and growth > 1.05 else ""
        work = ", each of which does less" if self.more.any() and growth < 0.95 else work
        yield f"{np.minimum(n_v, n_f)[both].sum():.5g} a step{work}" if both.any() else ""
        yield change(
            float(idle_v),
            float(idle_f),
            "in which nothing runs" if self.unit == OPERATIONS else f"outside {NOUN[self.unit]}",
        )
        yield change(float(exposed_v), float(exposed_f), "in which nothing is computed")
        rest = float(time_v - idle_v - exposed_v - own_v.sum()), float(time_f - idle_f - exposed_f - own_f.sum())
        yield change(*rest, "in no stage, less overlap")
