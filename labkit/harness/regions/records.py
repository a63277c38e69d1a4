"""Records of a layer's regions, unfused and fused: raw medians of every round, with summaries on demand.

Rounds belong to epochs, between which the weights of all sides were put into new memory. Older records have rounds
alone, with weights that stayed in one place.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal

import numpy as np

from labkit.harness.frozen_record import FrozenRecord, ResultRecord
from labkit.harness.regions.sides import FUSED, GRAPH, ONE_CALL, OWN_GEMM, SDPA, UNFUSED
from labkit.harness.turns.call_record import CallRecord
from labkit.stages import Stage
from labkit.statistics import Ratio, Trust


class LayerCase(FrozenRecord):
    """A decode step through random layers."""

    impl: str
    model: str
    dtype: str
    batch: int  # sequences
    context: int  # tokens of each sequence in the KV cache
    threads: int
    layers: int


class LayerRecord(CallRecord, ResultRecord):
    """Timings of a case's layers."""

    case: LayerCase
    bytes: int  # that must be read from memory

    @property
    def floor_us(self) -> float | None:
        """The least time at the bandwidth of the rounds."""
        bandwidth = self.read_bandwidth_gb_s
        return None if bandwidth is None else self.bytes / bandwidth / 1e3


class RegionMeasurement(LayerRecord):
    """Times of a call of one region of a decode step's layers, unfused and fused, in microseconds.

    `rounds_us` has the median call of each round, with weights read from memory. On a GPU a call from Python counts
    with its wall time, and the sides named "…, graph" with the time of the GPU's work.
    """

    kind: Literal["region"] = "region"
    region: str
    ops: tuple[str, ...]  # torch ops of the unfused sequence that compute or copy
    unfused_bytes: int  # that these ops read and write
    flops: int
    warm_us: dict[str, tuple[float, ...]]  # as `rounds_us`, but one layer again and again, from the cache

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
        """The unfused side and the fused side that compare as in the engine: in a graph, or in the one-call step."""
        return (UNFUSED + GRAPH, FUSED + GRAPH) if FUSED + GRAPH in self.rounds_us else (UNFUSED, ONE_CALL)

    @property
    def floor_us(self) -> float | None:
        """The least time of a call at the bandwidth of the rounds; None as for `floor_share`."""
        return None if self.region == Stage.RESIDUAL else super().floor_us

    @property
    def judged(self) -> tuple[str, str]:
        """The sides as in the engine if that was timed, else both as called from Python."""
        return self.in_engine if self.in_engine[1] in self.rounds_us else (UNFUSED, FUSED)

    def ratio(self, baseline: str = UNFUSED, candidate: str = FUSED) -> Ratio:
        """Time of the baseline / time of the candidate."""
        return self.ratio_of(baseline, candidate)

    def gb_s(self, side: str) -> float:
        """Bytes that must be read / the time of a call."""
        return self.bytes / float(np.median(self.rounds_us[side])) / 1e3

    def floor_share(self, side: str) -> float | None:
        """Share of the limit: the least time at each round's read bandwidth / the side's time. None: no probe, or the
        region reads nothing from memory.
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
        """Whether to believe the gain of fusing this region, as in the engine if that was timed."""
        return self.trust_of(self.gain, self.floor_share(self.judged[1]))

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
            "verdict": str(self.verdict),
            "unit": self.unit,
            "count": self.count,
            "looks": list(self.looks),
            "scatter": None if self.scatter is None else asdict(self.scatter),
            "by_rate": None if self.by_rate is None else asdict(self.by_rate),
            "trustworthy": self.trust.trustworthy,
            "distrust": [doubt.why for doubt in self.trust.doubts],
            "published": source[0] if source else None,
            "published_source": source[1] if source else None,
        }


def published_region(region: str) -> tuple[float, str] | None:
    """The speedup that DeepSpeed published for a fused region, and its source."""
    from labkit.published import published  # imported on use, because it loads pandas

    frame = published("deep-fusion")
    rows = frame[frame["method"].str.partition(":")[0] == region]
    return None if rows.empty else (float(rows.iloc[0]["value"]), str(rows.iloc[0]["source"]))


class LadderMeasurement(LayerRecord):
    """All layers of a decode step with more and more regions fused: microseconds of a layer, by rung and round.

    Each rung adds one fusion to the rung before it.
    """

    kind: Literal["ladder"] = "ladder"

    @property
    def rungs(self) -> tuple[str, ...]:
        return tuple(self.rounds_us)

    def median_us(self, rung: str) -> float:
        return float(np.median(self.rounds_us[rung]))

    @property
    def judged(self) -> tuple[str, str]:
        return self.rungs[0], self.rungs[-1]

    def ratio(self, rung: str) -> Ratio:
        """Time of the first rung / time of `rung`."""
        return self.ratio_of(self.rungs[0], rung)

    @property
    def floor_share(self) -> float | None:
        """Share of the limit that the last rung reaches; None without a probe."""
        return None if self.floor_us is None else self.floor_us / self.median_us(self.rungs[-1])

    @property
    def trust(self) -> Trust:
        """Whether to believe the gain of fusing all regions of a layer."""
        return self.trust_of(self.gain, self.floor_share)
