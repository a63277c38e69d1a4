"""Two sides that read the same pages of weights, in new memory in each epoch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from labkit.harness.compare.measured_side import MeasuredSide
from labkit.harness.runs import SharedWeights
from labkit.harness.turns.sharing import SharedBlock, WeightBlock, matching

Answer = TypeVar("Answer")


class WeightSharing:
    """Places the weights of two versions of one side. Blocks that both have lie in memory that both read.

    Other blocks are in new memory of each side, as are all of them where nothing can be shared. `record` says why.
    """

    def __init__(self, sides: Sequence[MeasuredSide]) -> None:
        self._sides = sides
        self._pairs: list[tuple[SharedBlock, SharedBlock]] | None = None  # None: not known yet
        self._bytes: dict[int, int] = {}  # of the last side's blocks, by index
        self._shared_mb = 0.0
        self._why_not = ""

    @property
    def record(self) -> SharedWeights:
        """The weights that are shared by now."""
        total_mb = sum(self._bytes.values()) / 1e6
        return SharedWeights(shared_mb=self._shared_mb, total_mb=total_mb, why_not=self._why_not)

    def place(self) -> None:
        """Puts the weights of all sides into new memory."""
        if self._pairs is None:
            self._pairs = self._matching()
        if not (self._pairs and self._share(self._pairs)):
            self._for_all(lambda side: side.place())

    def _matching(self) -> list[tuple[SharedBlock, SharedBlock]]:
        if len(self._sides) != 2:
            return self._nothing("only two sides can share weights")
        for side in self._sides:
            if not side.shares:
                more = "has several ranks" if side.spec.ranks > 1 else "is a version from before shared weights"
                return self._nothing(f"{side.name} {more}")
        answers = self._for_all(lambda side: side.weight_blocks())
        for answer in answers:
            if "why_not" in answer:
                return self._nothing(answer["why_not"])
        first, second = ([WeightBlock(*block) for block in answer["blocks"]] for answer in answers)
        self._bytes = {index: block.size for index, block in enumerate(second)}
        return matching(first, second) or self._nothing("the versions have no weights in the same layout")

    def _share(self, pairs: list[tuple[SharedBlock, SharedBlock]]) -> bool:
        """Puts blocks that both sides have into new memory. False: nothing is shared from now on."""
        first, second = self._sides
        published = first.publish([ours for ours, _ in pairs])
        if "why_not" in published:
            return bool(self._nothing(published["why_not"]))
        positioned = [
            theirs._replace(position=position)
            for (_, theirs), position in zip(pairs, published["positions"], strict=True)
        ]
        adopted = second.adopt(published["pid"], published["file"], positioned)
        if "why_not" in adopted:
            return bool(self._nothing(adopted["why_not"]))
        same: list[bool] = adopted["same"]
        self._pairs = [pair for pair, is_same in zip(pairs, same, strict=True) if is_same]
        self._shared_mb = sum(self._bytes[theirs.number] for _, theirs in self._pairs) / 1e6
        return True

    def _nothing(self, why_not: str) -> list[Any]:
        self._pairs, self._shared_mb, self._why_not = [], 0.0, why_not
        return []

    def _for_all(self, call: Callable[[MeasuredSide], Answer]) -> list[Answer]:
        with ThreadPoolExecutor(len(self._sides)) as pool:
            return list(pool.map(call, self._sides))
