"""Tables of rotary embedding, as long as the texts so far."""

from __future__ import annotations

import torch

from labkit.kernels.types import Rotary
from labkit.models.config import RotarySpec

FIRST_POSITIONS = 256


class RotaryTables:
    """The tables of one model on one device; they grow by doubling."""

    def __init__(self, spec: RotarySpec | None, device: torch.device) -> None:
        self._spec, self._device = spec, device
        self._tables: Rotary | None = None

    def reaching(self, positions: int) -> Rotary | None:
        """Tables of at least so many positions; None for a model that rotates nothing."""
        if self._spec is None:
            return None
        if self._tables is None or len(self._tables.cosine) < positions:
            before = 0 if self._tables is None else len(self._tables.cosine)
            self._tables = rotary_tables(self._spec, max(positions, FIRST_POSITIONS, 2 * before), self._device)
        return self._tables


def rotary_tables(spec: RotarySpec, positions: int, device: torch.device | None = None) -> Rotary:
    """Cosine and sine of the first `positions` positions."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), torch.tensor(spec.inv_freq))
    cosine, sine = (table.mul(spec.attention_scaling).to(device) for table in (angles.cos(), angles.sin()))
    return Rotary(cosine, sine, spec.interleaved)
