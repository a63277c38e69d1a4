"""Records of exchanges between ranks: the time of each call, by way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from labkit.harness.environment import Environment
from labkit.harness.frozen_record import ResultRecord
from labkit.statistics import Ratio, Summary, Trust, grade, ratio, summarise

SHARED_MEMORY, GLOO = "cpp", "reference"  # `impl` of labkit.kernels.all_reduce
WAYS = {SHARED_MEMORY: "shared memory", GLOO: "gloo"}


class ExchangeMeasurement(ResultRecord):
    """Sums of `bytes` of float32 over `ranks` ranks of one thread each, called from Python."""

    kind: Literal["exchange"] = "exchange"
    ranks: int
    bytes: int
    transport: str  # that the impl "cpp" really used
    pinned: bool  # each rank had a core of its own
    environment: Environment
    rounds_us: dict[str, tuple[tuple[float, ...], ...]]  # microseconds of the slowest rank, by impl, round and call

    def summary(self, impl: str) -> Summary:
        """Distribution of all calls."""
        return summarise([call for calls in self.rounds_us[impl] for call in calls])

    def medians_us(self, impl: str) -> list[float]:
        """One figure per round."""
        return [float(np.median(calls)) for calls in self.rounds_us[impl]]

    def median_us(self, impl: str = SHARED_MEMORY) -> float:
        return float(np.median(self.medians_us(impl)))

    def ratio(self) -> Ratio:
        """Time of gloo / time of shared memory, with its interval over rounds."""
        return ratio(self.medians_us(GLOO), self.medians_us(SHARED_MEMORY))

    @property
    def trust(self) -> Trust:
        """Whether to believe the ratio."""
        return grade(self.ratio(), len(self.rounds_us[SHARED_MEMORY]))

    def as_dict(self) -> dict[str, Any]:
        """A row of `labkit kernels --op all_reduce --json`."""
        speedup = self.ratio()
        return {
            "op": "all_reduce",
            "ranks": self.ranks,
            "bytes": self.bytes,
            "transport": self.transport,
            "pinned": self.pinned,
            **{f"{impl}_us": self.median_us(impl) for impl in WAYS},
            **{f"{impl}_p95_us": self.summary(impl).p95 for impl in WAYS},
            "ratio": speedup.value,
            "ratio_low": speedup.low,
            "ratio_high": speedup.high,
            "rounds": len(self.rounds_us[SHARED_MEMORY]),
            "trustworthy": self.trust.trustworthy,
            "distrust": [doubt.why for doubt in self.trust.doubts],
        }


def exchange_remarks(rows: Sequence[ExchangeMeasurement]) -> list[str]:
    """Weaknesses of these figures."""
    first, weaknesses = rows[0], []
    if first.transport != WAYS[SHARED_MEMORY]:
        weaknesses.append(f"the ranks share no memory here: the impl {SHARED_MEMORY!r} used {first.transport} too")
    if not first.pinned:
        weaknesses.append(
            f"{first.ranks} ranks had no cores of their own ({first.environment.cores} in all), so they also waited "
            "for cores"
        )
    environment = first.environment
    if environment.load_average > environment.cores / 2:
        weaknesses.append(f"the machine was busy before the first round (load {environment.load_average})")
    return weaknesses


class HandOverMeasurement(ResultRecord):
    """Messages of float32 [rows, width] from a rank to the next rank and back. Each rank has one thread."""

    kind: Literal["hand_over"] = "hand_over"
    rows: int
    width: int
    transport: str
    environment: Environment
    rounds_us: tuple[tuple[float, ...], ...]  # of each message by round, from before it is sent until it has arrived

    @property
    def median_us(self) -> float:
        """Median over rounds of each round's median."""
        return float(np.median([np.median(calls) for calls in self.rounds_us]))
