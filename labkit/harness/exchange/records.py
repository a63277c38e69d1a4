"""Record of one size of sum over ranks: what each call took, by the way that the parts went."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import numpy as np
from pydantic import Field

from labkit.harness.environment import Environment
from labkit.harness.records import SCHEMA_VERSION, FrozenRecord
from labkit.statistics import Ratio, Summary, Trust, grade, ratio, summarise

SHARED_MEMORY, GLOO = "cpp", "reference"  # `impl` of labkit.kernels.all_reduce
WAYS = {SHARED_MEMORY: "shared memory", GLOO: "gloo"}


class ExchangeMeasurement(FrozenRecord):
    """Sums of `bytes` of float32 over `ranks` ranks of one thread each, called from Python.

    `rounds_us`: by impl and round, the microseconds of each call, those of the slowest rank. `transport`: what the
    impl "cpp" really used. `pinned`: whether each rank had a core of its own.
    """

    kind: Literal["exchange"] = "exchange"
    schema_version: Literal[1] = SCHEMA_VERSION
    created: datetime = Field(default_factory=lambda: datetime.now(UTC))
    ranks: int
    bytes: int
    transport: str
    pinned: bool
    environment: Environment
    rounds_us: dict[str, tuple[tuple[float, ...], ...]]

    def summary(self, impl: str) -> Summary:
        """Distribution of all calls."""
        return summarise([call for calls in self.rounds_us[impl] for call in calls])

    def medians_us(self, impl: str) -> list[float]:
        """One figure per round."""
        return [float(np.median(calls)) for calls in self.rounds_us[impl]]

    def median_us(self, impl: str = SHARED_MEMORY) -> float:
        return float(np.median(self.medians_us(impl)))

    def ratio(self) -> Ratio:
        """Time of gloo over that of shared memory, with its interval over rounds."""
        return ratio(self.medians_us(GLOO), self.medians_us(SHARED_MEMORY))

    @property
    def trust(self) -> Trust:
        """Whether the ratio is to be trusted."""
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
    """What weakens these figures."""
    first, found = rows[0], []
    if first.transport != WAYS[SHARED_MEMORY]:
        found.append(f"the ranks share no memory here: the impl {SHARED_MEMORY!r} went by {first.transport} too")
    if not first.pinned:
        found.append(f"{first.ranks} ranks had no core each of {first.environment.cores}, so they waited for cores too")
    environment = first.environment
    if environment.load_average > environment.cores / 2:
        found.append(f"the machine was busy before the first round (load {environment.load_average})")
    return found


class HandOverMeasurement(FrozenRecord):
    """Messages of float32 [rows, width] from a rank to the next one and back, each rank of one thread.

    `rounds_us`: by round, the microseconds of each, from before it is sent until its payload is there.
    """

    kind: Literal["hand_over"] = "hand_over"
    schema_version: Literal[1] = SCHEMA_VERSION
    created: datetime = Field(default_factory=lambda: datetime.now(UTC))
    rows: int
    width: int
    transport: str
    environment: Environment
    rounds_us: tuple[tuple[float, ...], ...]

    @property
    def median_us(self) -> float:
        """Median over rounds of a round's median."""
        return float(np.median([np.median(calls) for calls in self.rounds_us]))
