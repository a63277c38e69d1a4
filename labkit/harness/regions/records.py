"""Record of one region of a layer, unfused and fused. Raw medians of every round; summaries are made when asked for."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal

import numpy as np
from pydantic import Field

from labkit.harness.environment import Environment
from labkit.harness.records import SCHEMA_VERSION, FrozenRecord
from labkit.harness.regions.sides import FUSED, GRAPH, ONE_CALL, OWN_GEMM, SDPA, UNFUSED
from labkit.stages import Stage
from labkit.statistics import Ratio, ShareOfLimit, Trust, grade, ratio, taken_cores


class LayerCase(FrozenRecord):
    """A decode step of `batch` sequences with `context` tokens in the cache of each, through `layers` random layers."""

    impl: str
    model: str
    dtype: str
    batch: int
    context: int
    threads: int
    layers: int


class LayerRecord(FrozenRecord):
    """What was timed of such layers: microseconds by way to run them, one figure per round. `bytes`: to be read from
    memory at least; `bandwidth_gb_s`: read beside each round.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    created: datetime = Field(default_factory=lambda: datetime.now(UTC))
    case: LayerCase
    environment: Environment
    bytes: int
    rounds_us: dict[str, tuple[float, ...]]
    bandwidth_gb_s: tuple[float, ...] | None
    others_cores: tuple[float, ...] | None = None  # by round, the processors that other programs kept busy

    @property
    def read_bandwidth_gb_s(self) -> float | None:
        return None if self.bandwidth_gb_s is None else float(np.median(self.bandwidth_gb_s))

    def trust_of(self, found: Ratio, share: float | None = None) -> Trust:
        """Whether a ratio of two of the sides is to be trusted; `share`: of the limit, that its candidate reached."""
        needed = self.case.threads if self.environment.gpu is None else 1
        taken = [taken_cores(each, needed=needed, cores=self.environment.cores) for each in self.others_cores or ()]
        shares = [] if share is None else [ShareOfLimit("the fused side", share)]
        return grade(found, len(next(iter(self.rounds_us.values()))), taken_cores=taken, shares=shares)

    @property
    def floor_us(self) -> float | None:
        """The least time at the bandwidth beside the rounds."""
        bandwidth = self.read_bandwidth_gb_s
        return None if bandwidth is None else self.bytes / bandwidth / 1e3


class RegionMeasurement(LayerRecord):
    """One region of a decode step's layers: how long a call takes, unfused and fused. Microseconds.

    `rounds_us`: by side, the median call of each round, weights coming from memory; `warm_us`: one layer again and
    again. `ops` and `unfused_bytes` are what the unfused sequence comes to:
    its torch ops that compute or copy, and what they read and write. On a GPU a call from Python takes its wall time,
    and the sides named "…, graph" what the GPU does for it.
    """

    kind: Literal["region"] = "region"
    region: str
    ops: tuple[str, ...]
    unfused_bytes: int
    flops: int
    warm_us: dict[str, tuple[float, ...]]

    def median_us(self, side: str, *, warm: bool = False) -> float | None:
        """Median over rounds; None where the side has no such region."""
        samples = (self.warm_us if warm else self.rounds_us).get(side)
        return float(np.median(samples)) if samples else None

    def quartiles_us(self, side: str) -> tuple[float, float]:
        """The middle half of the rounds."""
        low, high = np.quantile(self.rounds_us[side], (0.25, 0.75))
        return float(low), float(high)

    @property
    def in_engine(self) -> tuple[str, str]:
        """The fused side that is as the engine runs it, behind the unfused one to hold against it."""
        return (UNFUSED + GRAPH, FUSED + GRAPH) if FUSED + GRAPH in self.rounds_us else (UNFUSED, ONE_CALL)

    @property
    def floor_us(self) -> float | None:
        """The least time of a call at the bandwidth beside the rounds; None as for `floor_share`."""
        return None if self.region == Stage.RESIDUAL else super().floor_us

    def ratio(self, baseline: str = UNFUSED, candidate: str = FUSED) -> Ratio:
        """Time of one side over that of another."""
        return ratio(self.rounds_us[baseline], self.rounds_us[candidate])

    def gb_s(self, side: str) -> float:
        """Bytes that must be read over the time of a call."""
        return self.bytes / float(np.median(self.rounds_us[side])) / 1e3

    def floor_share(self, side: str) -> float | None:
        """The least time that the memory beside each round allowed / the time the side took. None: nothing to read
        from memory, or no probe.
        """
        if self.bandwidth_gb_s is None or self.region == Stage.RESIDUAL or side not in self.rounds_us:
            return None
        shares = [
            self.bytes / bandwidth / 1e3 / took
            for bandwidth, took in zip(self.bandwidth_gb_s, self.rounds_us[side], strict=True)
        ]
        return float(np.median(shares))

    @property
    def trust(self) -> Trust:
        """Whether what fusing gives this region is to be trusted, as the engine runs it where that was timed."""
        unfused, fused = self.in_engine
        sides = (unfused, fused) if fused in self.rounds_us else (UNFUSED, FUSED)
        return self.trust_of(self.ratio(*sides), self.floor_share(sides[1]))

    @property
    def published(self) -> tuple[float, str] | None:
        """The published speedup of this region and its source."""
        return published_region(self.region)

    def as_dict(self) -> dict[str, Any]:
        """A row of `labkit kernels --json`."""
        unfused, fused = self.in_engine
        speedup, inside = self.ratio(), self.ratio(unfused, fused) if fused in self.rounds_us else None
        source = self.published
        return {
            "region": self.region,
            **self.case.model_dump(),
            "reference_us": self.median_us(UNFUSED),
            "torch_sdpa_us": self.median_us(SDPA),
            "unfused_own_gemm_us": self.median_us(OWN_GEMM),
            "fused_us": self.median_us(FUSED),
            "one_call_us": self.median_us(ONE_CALL),
            "graph_reference_us": self.median_us(UNFUSED + GRAPH),
            "graph_fused_us": self.median_us(FUSED + GRAPH),
            "warm_reference_us": self.median_us(UNFUSED, warm=True),
            "warm_fused_us": self.median_us(FUSED, warm=True),
            "ratio": speedup.value,
            "ratio_low": speedup.low,
            "ratio_high": speedup.high,
            "engine_ratio": inside and inside.value,
            "engine_ratio_low": inside and inside.low,
            "engine_ratio_high": inside and inside.high,
            "reference_ops": len(self.ops),
            "reference_bytes": self.unfused_bytes,
            "bytes": self.bytes,
            "gb_s": self.gb_s(FUSED),
            "floor_share": self.floor_share(FUSED),
            "engine_floor_share": self.floor_share(fused),
            "trustworthy": self.trust.trustworthy,
            "distrust": [doubt.why for doubt in self.trust.doubts],
            "published": source[0] if source else None,
            "published_source": source[1] if source else None,
        }


def published_region(region: str) -> tuple[float, str] | None:
    """The speedup that DeepSpeed published for a fused region, and where."""
    from labkit.published import published  # loads pandas, which is not for every process that measures

    frame = published("deep-fusion")
    found = frame[frame["method"].str.partition(":")[0] == region]
    return None if found.empty else (float(found.iloc[0]["value"]), str(found.iloc[0]["source"]))


class LadderMeasurement(LayerRecord):
    """All layers of a decode step, with one region after another fused: microseconds of a layer, by rung and round.

    The rungs in their order: each fuses what the one before it fuses, and one thing more.
    """

    kind: Literal["ladder"] = "ladder"

    @property
    def rungs(self) -> tuple[str, ...]:
        return tuple(self.rounds_us)

    def median_us(self, rung: str) -> float:
        return float(np.median(self.rounds_us[rung]))

    def ratio(self, rung: str) -> Ratio:
        """Time of the first rung over that of another."""
        return ratio(self.rounds_us[self.rungs[0]], self.rounds_us[rung])

    @property
    def floor_share(self) -> float | None:
        """Share of the limit that the last rung reaches; None without a probe."""
        return None if self.floor_us is None else self.floor_us / self.median_us(self.rungs[-1])

    @property
    def trust(self) -> Trust:
        """Whether what fusing everything gives a layer is to be trusted."""
        return self.trust_of(self.ratio(self.rungs[-1]), self.floor_share)
