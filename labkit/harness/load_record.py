"""Record of the time and memory in which ranks load a model, from one file for all and from a file for each rank."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from labkit.harness.environment import Environment
from labkit.harness.frozen_record import FrozenRecord, ResultRecord
from labkit.statistics import Ratio, ratio

ONE_FILE, OWN_FILES = "one file for all", "a file for each rank"


class PackedMemory(FrozenRecord):
    """Bytes that loading a whole model takes."""

    peak: int  # the most anonymous memory while it is loaded
    packed: int  # packed matrices at the end

    @property
    def share(self) -> float:
        return self.peak / self.packed


class LoadMeasurement(ResultRecord):
    """All ranks load their shares of a model at once, each in a fresh process, from files in the page cache."""

    kind: Literal["load"] = "load"
    ranks: int
    dtype: str
    model_bytes: int
    share_bytes: tuple[int, ...]  # weights of each rank at the end
    largest_bytes: tuple[int, ...]  # the largest tensor of each rank
    environment: Environment
    rounds_s: dict[str, tuple[tuple[float, ...], ...]]  # seconds by way, round and rank
    peak_bytes: dict[str, tuple[int, ...]]  # the most anonymous memory by way and rank, from runs that are not timed
    precisions: dict[str, PackedMemory] = Field(default_factory=dict)  # one process loads the whole model, by precision

    def seconds(self, way: str) -> list[float]:
        """Seconds of the slowest rank, by round."""
        return [max(ranks) for ranks in self.rounds_s[way]]

    def ratio(self) -> Ratio:
        """Time from one file / time from a file for each rank, with its interval over rounds."""
        return ratio(self.seconds(ONE_FILE), self.seconds(OWN_FILES))

    def peak_share(self, way: str) -> float:
        """The peak memory of a rank without its largest tensor / the bytes of its weights: the maximum over ranks."""
        ranks = zip(self.peak_bytes[way], self.largest_bytes, self.share_bytes, strict=True)
        return max((peak - largest) / share for peak, largest, share in ranks)
