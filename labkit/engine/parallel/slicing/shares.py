"""How many features or heads each rank keeps, and where they lie in the rows of a weight."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.models.shards import HeadShare, evenly, head_shares, joined

Share = tuple[range, ...]  # the indices along one axis that a rank keeps, in its order
Shares = tuple[Share, ...]  # one per rank


GRAINS = (64, 32, 16, 8)


def grain(count: int, ranks: int) -> int:
    """The largest piece of features that is given out whole: GEMMs want sizes that their tiles and loads divide."""
    return next((size for size in GRAINS if count % size == 0 and count // size >= ranks), 1)


def length(share: Share) -> int:
    return sum(len(piece) for piece in share)


def take(tensor: Tensor, axis: int, share: Share) -> Tensor:
    """A copy of the share's part of `tensor` along `axis`."""
    return torch.cat([tensor.narrow(axis, piece.start, len(piece)) for piece in share], axis)


@dataclass(frozen=True)
class Features:
    """Features that don't mix, such as those between the two matrices of an MLP: `count` of them over `ranks`."""

    count: int
    ranks: int

    @property
    def keeps(self) -> tuple[range, ...]:
        size = grain(self.count, self.ranks)
        pieces = evenly(self.count // size, self.ranks)
        return tuple(range(keep.start * size, keep.stop * size) for keep in pieces)

    def contiguous(self, parts: int = 1) -> Shares:
        """Of rows [parts, count]: gate and up, one above the other."""
        return tuple(
            joined(range(part * self.count + keep.start, part * self.count + keep.stop) for part in range(parts))
            for keep in self.keeps
        )

    def interleaved(self, parts: int) -> Shares:
        """Of rows [count, parts]: gate and up, row by row."""
        return tuple((range(keep.start * parts, keep.stop * parts),) for keep in self.keeps)


@dataclass(frozen=True)
class HeadGroups:
    """Query heads that share KV heads in equal groups, and how ranks share them (`models.shards.head_shares`)."""

    count: int
    kv_count: int
    size: int
    ranks: int

    @property
    def group(self) -> int:
        return self.count // self.kv_count

    @property
    def shares(self) -> tuple[HeadShare, ...]:
        return head_shares(self.count, self.kv_count, self.ranks)

    def by_query(self, width: int) -> Shares:
        """Of rows [heads, width]."""
        return tuple((range(s.query.start * width, s.query.stop * width),) for s in self.shares)

    def by_kv(self, width: int) -> Shares:
        """Of rows [KV heads, width]."""
        return tuple(joined(range(head * width, (head + 1) * width) for head in s.kv) for s in self.shares)

    def stacked(self, kinds: str) -> Shares:
        """Of rows such as all q, then all k, then all v ("qkv"), or all k, then all v ("kv")."""
        stacks, start = [], 0
        for kind in kinds:
            stacks.append((start, self.by_query(self.size) if kind == "q" else self.by_kv(self.size)))
            start += (self.count if kind == "q" else self.kv_count) * self.size
        return tuple(
            joined(range(at + piece.start, at + piece.stop) for at, stack in stacks for piece in stack[rank])
            for rank in range(self.ranks)
        )

    def grouped(self) -> Shares:
        """Of rows [KV heads, group + 2, size]: the queries of a group, its key, its value."""

        def row(kv: int, place: int) -> range:
            start = (kv * (self.group + 2) + place) * self.size
            return range(start, start + self.size)

        def rows(share: HeadShare) -> Iterable[range]:
            for index, kv in enumerate(share.kv):
                for query in share.query[index * share.group : (index + 1) * share.group]:
                    yield row(query // self.group, query % self.group)
                yield row(kv, self.group)
                yield row(kv, self.group + 1)

        return tuple(joined(rows(share)) for share in self.shares)
