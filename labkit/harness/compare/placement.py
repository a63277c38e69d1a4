"""Memory of a side's weights. It is new in each epoch, and another process may read the same pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from labkit.harness.environment import read_memory, reset_peak_memory
from labkit.harness.turns.pages import AddressRange
from labkit.harness.turns.placing import place_anew
from labkit.harness.turns.sharing import SharedBlock, SharedPages


class PeakMemory:
    """Peak memory of this process from now on, without the memory that it holds now."""

    def __init__(self, device: torch.device) -> None:
        reset_peak_memory(device)
        self._device = device
        self._before = self._peak = read_memory(device).now

    @property
    def bytes(self) -> int:
        """The peak so far."""
        return max(self._peak, read_memory(self._device).peak) - self._before

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Memory that is used inside this context does not count, such as a second copy of the weights."""
        self._peak = max(self._peak, read_memory(self._device).peak)
        try:
            yield
        finally:
            reset_peak_memory(self._device)


class Placement:
    """The memory of a side's weights, which torch's tensors hold. Every method returns plain JSON data."""

    def __init__(self, tensors: Sequence[torch.Tensor], peak: PeakMemory) -> None:
        self._tensors, self._peak = tensors, peak

    def place(self) -> dict[str, Any]:
        """Puts the weights into new memory. Returns whether most of them lie there."""
        with self._peak.paused():
            return {"placed": self._move()}

    def blocks(self, step: Callable[[], object]) -> dict[str, Any]:
        """The blocks of the weights that another process may share. `step`: generates something new, so that memory
        that it writes to can be told from weights.
        """
        self._pages = SharedPages(self._tensors, step)
        return {"blocks": self._pages.blocks}

    def publish(self, *, blocks: list[list[Any]]) -> dict[str, Any]:
        """Puts these blocks into new memory that another process can share, and places the other blocks as `place`
        does. `why_not` in the answer: nothing is shared, and why.
        """
        with self._peak.paused():
            try:
                published = self._pages.publish([SharedBlock(*block) for block in blocks])
            except (MemoryError, OSError) as error:
                return {"why_not": str(error)}
            return published | {"placed": self._move(self._pages.shared)}

    def adopt(self, *, pid: int, file: int, blocks: list[list[Any]]) -> dict[str, Any]:
        """Shares the blocks that the process `pid` has published, and places the other blocks as `place` does. Returns
        which blocks have the same bytes. `why_not` in the answer: nothing is shared, and why.
        """
        with self._peak.paused():
            try:
                same = self._pages.adopt(pid, file, [SharedBlock(*block) for block in blocks])
            except (MemoryError, OSError) as error:
                return {"why_not": str(error)}
            return {"same": same, "placed": self._move(self._pages.shared)}

    def _move(self, shared: Sequence[AddressRange] = ()) -> bool:
        """Puts the weights into new memory, except for shared ones, which are there already."""
        placed = place_anew(self._tensors, but=shared)
        return placed._replace(moved=placed.moved + sum(span.size for span in shared)).anew
