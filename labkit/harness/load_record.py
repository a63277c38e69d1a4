"""Record of how ranks load a model, from one file for all and from a file for each: seconds and memory."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

from pydantic import ConfigDict, Field

from labkit.harness.environment import Environment
from labkit.harness.records import SCHEMA_VERSION, FrozenRecord
from labkit.statistics import Ratio, ratio
from labkit.system.validation import Listed

ONE_FILE, OWN_FILES = "one file for all", "a file for each rank"


class PackedMemory(Listed):
    """Bytes of anonymous memory at most while a whole model was loaded, and of its packed matrices in the end."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    peak: int
    packed: int

    @property
    def share(self) -> float:
        return self.peak / self.packed


class LoadMeasurement(FrozenRecord):
    """All ranks load their shares of a model at once, each in a fresh process, from files in the page cache.

    `rounds_s`: by way and round, the seconds of each rank. `peak_bytes`: by way, how much anonymous memory each rank
    had at most while it loaded, in runs that are not timed. `share_bytes`, `largest_bytes`: what each rank holds in the
    end, and the largest tensor of it. `precisions`: what one process takes that loads all of the model in the precision
    of this name.
    """

    kind: Literal["load"] = "load"
    schema_version: Literal[1] = SCHEMA_VERSION
    created: datetime = Field(default_factory=lambda: datetime.now(UTC))
    ranks: int
    dtype: str
    model_bytes: int
    share_bytes: tuple[int, ...]
    largest_bytes: tuple[int, ...]
    environment: Environment
    rounds_s: dict[str, tuple[tuple[float, ...], ...]]
    peak_bytes: dict[str, tuple[int, ...]]
    precisions: dict[str, PackedMemory] = Field(default_factory=dict)

    def seconds(self, way: str) -> list[float]:
        """Of the slowest rank, by round."""
        return [max(ranks) for ranks in self.rounds_s[way]]

    def ratio(self) -> Ratio:
        """Time from one file over that from a file for each, with its interval over rounds."""
        return ratio(self.seconds(ONE_FILE), self.seconds(OWN_FILES))

    def peak_share(self, way: str) -> float:
        """The most memory of a rank, less its largest tensor, as a part of its share."""
        found = zip(self.peak_bytes[way], self.largest_bytes, self.share_bytes, strict=True)
        return max((peak - largest) / share for peak, largest, share in found)
