"""Tables of rotary embedding: for all positions up to the length of usual texts, or for the positions of one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from labkit.engine.memory.kv_cache import KVCache
from labkit.kernels.types import Rotary, Rows
from labkit.models.config import RotarySpec

FIRST_POSITIONS = 256
FEW_POSITIONS = 1 << 16  # always kept: 32 MB with 64 frequencies


class RotaryTables:
    """Rotary tables of one model on one device. They grow by doubling."""

    def __init__(self, specs: Sequence[RotarySpec], device: torch.device) -> None:
        """specs: of the model's tables; empty: it has no rotary embedding."""
        self._specs, self._device = tuple(specs), device
        self._tables: Rotary | None = None
        self._positions = 0  # of the tables

    def holds(self, positions: int, cache: KVCache) -> bool:
        """Tells whether to keep tables of all positions below `positions` for this cache. The tables are smaller than
        the cache, unless a text begins at a position far beyond its slots.
        """
        return not self._specs or positions <= FEW_POSITIONS or positions <= cache.capacity

    def reaching(self, positions: int) -> Rotary | None:
        """Returns tables of at least `positions` positions; None for a model without rotary embedding."""
        if not self._specs:
            return None
        if self._tables is None or self._positions < positions:
            positions = max(positions, FIRST_POSITIONS, 2 * self._positions)
            self._tables = rotary_tables(self._specs, positions, self._device)
            self._positions = positions
        return self._tables

    def of(self, rows: Sequence[Rows]) -> tuple[list[Rows], Rotary]:
        """Returns the rows with table indices instead of positions, and tables of these positions alone."""
        assert self._specs
        tables = rotary_at(self._specs, torch.cat([part.positions for part in rows]).cpu(), self._device)
        indices = torch.arange(tables.positions, dtype=torch.int32, device=self._device)
        splits = indices.split([len(part.positions) for part in rows])
        return [replace(part, positions=split) for part, split in zip(rows, splits, strict=True)], tables


def rotary_tables(specs: Sequence[RotarySpec], positions: int, device: torch.device | None = None) -> Rotary | None:
    """Returns cosine and sine of the first `positions` positions, for each of the specs; None: there are no specs."""
    return rotary_at(specs, torch.arange(positions), device) if specs else None


def rotary_at(specs: Sequence[RotarySpec], positions: Tensor, device: torch.device | None = None) -> Rotary:
    """Returns cosine and sine of integer positions [N], which become float32 as in transformers."""
    angles = [torch.outer(positions.float(), torch.tensor(spec.inv_freq)) for spec in specs]
    cosine, sine = (
        torch.stack([table(part).mul(spec.attention_scaling) for part, spec in zip(angles, specs, strict=True)])
        for table in (torch.cos, torch.sin)
    )
    if len(specs) == 1:
        cosine, sine = cosine[0], sine[0]
    return Rotary(cosine.to(device), sine.to(device), specs[0].interleaved)
