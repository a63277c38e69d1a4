"""Record of the experts that decode steps read from the disk."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

from labkit.harness.frozen_record import FrozenRecord
from labkit.kernels.expert_store import ExpertCounts


class ExpertReads(FrozenRecord):
    """Counts of some decode steps. An expert counts once for each layer and step that wants it."""

    wanted: int  # experts that rows chose
    hits: int  # of these, already in memory
    guessed_hits: int  # of the hits, read because of a guess
    guesses: int  # experts that were guessed at the beginning of their layer
    right: int  # guesses that rows then chose
    reads: int
    read_mb: float
    wasted_mb: float  # of `read_mb`, for guesses that proved wrong
    wait_ms: float  # in which the steps waited for experts

    @classmethod
    def of(cls, counts: ExpertCounts) -> Self:
        same = {name: getattr(counts, name) for name in cls.model_fields if name in ExpertCounts._fields}
        return cls(
            **same, read_mb=counts.bytes_read / 1e6, wasted_mb=counts.wasted_bytes / 1e6, wait_ms=counts.wait_ns / 1e6
        )

    @classmethod
    def sum_of(cls, reads: Iterable[ExpertReads]) -> ExpertReads | None:
        """The counts of all steps together; None without any."""
        parts = list(reads)
        return cls(**{name: sum(getattr(part, name) for part in parts) for name in cls.model_fields}) if parts else None

    @property
    def hit_rate(self) -> float:
        return self.hits / self.wanted if self.wanted else 0.0

    @property
    def needed_mb(self) -> float:
        """MB of the experts that were read and then used."""
        return self.read_mb - self.wasted_mb

    @property
    def accuracy(self) -> float | None:
        """Part of the guesses that were right; None without guesses."""
        return self.right / self.guesses if self.guesses else None

    def __str__(self) -> str:
        guessed = "" if self.accuracy is None else f", {self.accuracy:.0%} of the guesses were right"
        return f"{self.hit_rate:.0%} of the chosen experts were in memory{guessed}, {self.read_mb:.4g} MB were read"
