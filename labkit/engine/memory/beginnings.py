"""The beginnings that sequences of a cache have in common, so that a reordered cache copies only what differs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np

from labkit.engine.memory.heads import StoredHeads
from labkit.engine.memory.stores import HeadStore
from labkit.engine.team_size import team_size
from labkit.kernels.abi import CCache
from labkit.kernels.build import in_use_already
from labkit.kernels.slot_copies import SlotCopy, copy_slots

LEAST_SHARED = 128  # tokens: attention to fewer takes less time than to merge two parts of it


class Beginnings:
    """Counts the first tokens that any two sequences have in common, as known from earlier copies.

    Beams of one text differ in their last tokens alone. So beam search copies a few tokens per step, not the cache, and
    attention reads the tokens that they share once.

    alike: consecutive sequences of one text; reordering leaves them among themselves.
    shared: the first tokens that all sequences of each text have in common; 0: too few for attention to profit.
    """

    def __init__(self, sequences: int, alike: int = 1) -> None:
        self._common = np.zeros((sequences, sequences), dtype=np.int64)
        self.alike, self.shared = alike, 0

    @classmethod
    def repeated(cls, sequences: int, repeats: int, length: int) -> Beginnings:
        """Beginnings of `sequences` in groups: `repeats` equal sequences of `length` tokens each."""
        beginnings = cls(sequences, repeats)
        beginnings._common[beginnings._texts[:, None] == beginnings._texts] = length
        beginnings._note_shared()
        return beginnings

    @property
    def _texts(self) -> np.ndarray:
        """The number of each sequence's text."""
        return np.arange(len(self._common)) // self.alike

    def _note_shared(self) -> None:
        same_text = self._texts[:, None] == self._texts
        np.fill_diagonal(same_text, False)
        shared = int(self._common[same_text].min()) if self.alike > 1 else 0
        self.shared = shared if shared >= LEAST_SHARED else 0

    def reorder(
        self, heads: HeadStore | None, length: int, views: Callable[[], ctypes.Array[CCache]], sources: Sequence[int]
    ) -> bool:
        """Replaces each sequence of `length` tokens by the one that `sources` names, in place. Returns False, and
        changes nothing, if the C++ kernels do not run, if keys and values are not resident on the CPU, or if the number
        of sequences changes.

        views: returns the C views of the layers of `heads`.
        """
        if not isinstance(heads, StoredHeads) or not heads.keys[0].is_cpu or in_use_already() is None:
            return False
        if len(sources) != len(self._common) or not all(0 <= source < len(sources) for source in sources):
            return False
        begins = self._common[range(len(sources)), sources].tolist()
        copies = [SlotCopy(to, source, begin) for to, (source, begin) in enumerate(zip(sources, begins, strict=True))]
        keys = heads.keys[0]
        slot_bytes = keys.stride(2) * keys.element_size()
        copy_slots(views(), copies, length, heads=keys.shape[1], slot_bytes=slot_bytes, threads=team_size())
        np.fill_diagonal(self._common, length)
        self._common = self._common[np.ix_(sources, sources)]
        if (self._texts[list(sources)] != self._texts).any():
            self.alike = 1
        self._note_shared()
        return True
