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

    def __init__(self, spec: RotarySpec | None, device: torch.device) -> None:
        self._spec, self._device = spec, device
        self._tables: Rotary | None = None
        self._positions = 0  # of the tables

    def holds(self, positions: int, cache: KVCache) -> bool:
        """Tells whether to keep tables of all positions below `positions` for this cache. The tables are smaller than
        the cache, unless a text begins at a position far beyond its slots.
        """
        return self._spec is None or positions <= FEW_POSITIONS or positions <= cache.capacity

    def reaching(self, positions: int) -> Rotary | None:
        """Returns tables of at least `positions` positions; None for a model without rotary embedding."""
        if self._spec is None:
            return None
        if self._tables is None or self._positions < positions:
            positions = max(positions, FIRST_POSITIONS, 2 * self._positions)
            self._tables = rotary_tables(self._spec, positions, self._device)
            self._positions = positions
        return self._tables

    def of(self, rows: Sequence[Rows]) -> tuple[list[Rows], Rotary]:
        """Returns the rows with table indices instead of positions, and tables of these positions alone."""
        assert self._spec is not None
        tables = rotary_at(self._spec, torch.cat([part.positions for part in rows]).cpu(), self._device)
        indices = torch.arange(len(tables.cosine), dtype=torch.int32, device=self._device)
        splits = indices.split([len(part.positions) for part in rows])
        return [replace(part, positions=split) for part, split in zip(rows, splits, strict=True)], tables


def rotary_tables(spec: RotarySpec, positions: int, device: torch.device | None = None) -> Rotary:
    """Returns cosine and sine of the first `positions` positions."""
    return rotary_at(spec, torch.arange(positions), device)


def rotary_at(spec: RotarySpec, positions: Tensor, device: torch.device | None = None) -> Rotary:
    """Returns cosine and sine of integer positions [N], which become float32 as in transformers."""
    angles = torch.outer(positions.float(), torch.tensor(spec.inv_freq))
    cosine, sine = (table.mul(spec.attention_scaling).to(device) for table in (angles.cos(), angles.sin()))
    return Rotary(cosine, sine, spec.interleaved)
