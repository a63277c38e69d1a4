"""The difference of two mean steps as a sum of parts, which is exact for any steps."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

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


class StepFeatures(NamedTuple):
    """The features of a mean step, or of many mean steps in columns. All are in ms but `pieces`."""

    time: Floats
    idle: Floats
    exposed: Floats
    pieces: Floats  # number of pieces of work that compute, a row per key of `Aligned`
    own: Floats  # time of these pieces
    stages: Floats  # a row per stage of `Aligned`


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
        counts = [self._features(mean).pieces for mean in self.means]
        self.fewer, self.more = counts[0] > counts[1], counts[0] < counts[1]

    def quantities(self, vanilla: Floats, fused: Floats) -> Floats:
        """Differences of the step, each part in order, and each row of `by_stage`. The parts add up to the step."""
        of_vanilla, of_fused = self._features(vanilla), self._features(fused)
        time, idle = of_vanilla.time - of_fused.time, of_vanilla.idle - of_fused.idle
        exposed = of_vanilla.exposed - of_fused.exposed
        removed, faster = _by_key(of_vanilla, of_fused)
        parts = [removed[self.fewer].sum(axis=0), removed[~self.fewer].sum(axis=0), faster.sum(axis=0), idle, exposed]
        rows = self.by_stage(vanilla) - self.by_stage(fused)
        return np.stack([time, *parts, time - sum(parts), *rows])

    def by_stage(self, mean: Floats) -> Floats:
        """The ms of a mean step by stage, idle time and overlap (negative), in rows that add up to the step."""
        features = self._features(mean)
        in_stages = features.stages.sum(axis=0)
        # If the pieces are operators, the time of a stage includes the gaps between them.
        idle = features.time - in_stages if self.unit == OPERATORS else features.idle
        return np.stack([*features.stages, idle, features.time - idle - in_stages])

    def _features(self, mean: Floats) -> StepFeatures:
        pieces, own = mean[3 : 3 + self._keys], mean[3 + self._keys : 3 + 2 * self._keys]
        return StepFeatures(mean[0], mean[1], mean[2], pieces, own, mean[3 + 2 * self._keys :])

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
        vanilla, fused = (self._features(mean) for mean in self.means)
        n_v, n_f, own_v, own_f = vanilla.pieces, fused.pieces, vanilla.own, fused.own

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
            float(vanilla.idle),
            float(fused.idle),
            "in which nothing runs" if self.unit == OPERATIONS else f"outside {NOUN[self.unit]}",
        )
        yield change(float(vanilla.exposed), float(fused.exposed), "in which nothing is computed")
        rest = [float(side.time - side.idle - side.exposed - side.own.sum()) for side in (vanilla, fused)]
        yield change(rest[0], rest[1], "in no stage, less overlap")


def _by_key(vanilla: StepFeatures, fused: StepFeatures) -> tuple[Floats, Floats]:
    """By key, the ms that fused saves, in two parts: by fewer pieces (negative: more pieces) and by faster ones."""
    vanilla_each = vanilla.own / np.where(vanilla.pieces > 0, vanilla.pieces, 1)
    fused_each = fused.own / np.where(fused.pieces > 0, fused.pieces, 1)
    each = np.where(vanilla.pieces >= fused.pieces, vanilla_each, fused_each)
    removed = (vanilla.pieces - fused.pieces) * each
    return removed, vanilla.own - fused.own - removed
