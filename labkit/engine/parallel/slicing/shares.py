"""Shares of the ranks: how many features or heads each keeps, and which rows of a weight they are."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.models.shards import HeadShare, evenly, head_shares, joined

Share = tuple[range, ...]  # the indices along one axis that a rank keeps, in its order
Shares = tuple[Share, ...]  # one per rank


GRAINS = (64, 32, 16, 8)


def grain(count: int, ranks: int) -> int:
    """Returns the number of features in a piece that stays whole: GEMMs want sizes that fit their tiles and loads."""
    return next((size for size in GRAINS if count % size == 0 and count // size >= ranks), 1)


def length(share: Share) -> int:
    return sum(len(piece) for piece in share)


def take(tensor: Tensor, axis: int, share: Share) -> Tensor:
    """Returns a copy of the share's part of `tensor` along `axis`."""
    return torch.cat([tensor.narrow(axis, piece.start, len(piece)) for piece in share], axis)


@dataclass(frozen=True)
class Features:
    """Independent features, for example between the two matrices of an MLP: `count` features over `ranks`."""

    count: int
    ranks: int

    @property
    def keeps(self) -> tuple[range, ...]:
        size = grain(self.count, self.ranks)
        pieces = evenly(self.count // size, self.ranks)
        return tuple(range(keep.start * size, keep.stop * size) for keep in pieces)

    def contiguous(self, parts: int = 1) -> Shares:
        """Returns the shares of rows [parts, count], for example gate and up, one above the other."""
        return tuple(
            joined(range(part * self.count + keep.start, part * self.count + keep.stop) for part in range(parts))
            for keep in self.keeps
        )

    def interleaved(self, parts: int) -> Shares:
        """Returns the shares of rows [count, parts], for example gate and up, row by row."""
        return tuple((range(keep.start * parts, keep.stop * parts),) for keep in self.keeps)


@dataclass(frozen=True)
class HeadGroups:
    """Query heads that share KV heads in equal groups, divided among ranks (`models.shards.head_shares`)."""

    count: int  # query heads
    kv_count: int  # KV heads
    size: int  # features of a head
    ranks: int

    @property
    def group(self) -> int:
        return self.count // self.kv_count

    @property
    def shares(self) -> tuple[HeadShare, ...]:
        return head_shares(self.count, self.kv_count, self.ranks)

    def by_query(self, width: int) -> Shares:
        """Returns the shares of rows [heads, width]."""
        return tuple((range(s.query.start * width, s.query.stop * width),) for s in self.shares)

    def by_kv(self, width: int) -> Shares:
        """Returns the shares of rows [KV heads, width]."""
        return tuple(joined(range(head * width, (head + 1) * width) for head in s.kv) for s in self.shares)

    def stacked(self, kinds: str) -> Shares:
        """Returns the shares of stacked rows: all q, then all k, then all v ("qkv"), or all k, then all v ("kv")."""
        stacks, start = [], 0
        for kind in kinds:
            stacks.append((start, self.by_query(self.size) if kind == "q" else self.by_kv(self.size)))
            start += (self.count if kind == "q" else self.kv_count) * self.size
        return tuple(
            joined(range(at + piece.start, at + piece.stop) for at, stack in stacks for piece in stack[rank])
            for rank in range(self.ranks)
        )

    def grouped(self) -> Shares:
        """Returns the shares of rows [KV heads, group + 2, size]: the queries of a group, its key, its value."""

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
