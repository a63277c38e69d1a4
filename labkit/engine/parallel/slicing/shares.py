"""Shares of the ranks: which indices along an axis of a tensor each rank keeps."""

import itertools
from collections.abc import Iterator
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


def lengths(shares: Shares) -> tuple[int, ...]:
    return tuple(map(length, shares))


def take(tensor: Tensor, axis: int, share: Share) -> Tensor:
    """Returns a copy of the share's part of `tensor` along `axis`."""
    pieces = [tensor.narrow(axis, piece.start, len(piece)) for piece in share]
    return torch.cat([tensor.narrow(axis, 0, 0), *pieces], axis)


def features(count: int, ranks: int, parts: int = 1, *, interleaved: bool = False) -> Shares:
    """Returns the shares of `parts` × `count` rows, for example gate and up, one above the other or row by row."""
    size = grain(count, ranks)
    keeps = [range(keep.start * size, keep.stop * size) for keep in evenly(count // size, ranks)]
    if interleaved:
        return tuple((range(keep.start * parts, keep.stop * parts),) for keep in keeps)
    return tuple(
        joined(range(part * count + keep.start, part * count + keep.stop) for part in range(parts)) for keep in keeps
    )


@dataclass(frozen=True)
class Owners:
    """Heads that need each index of an axis.

    group: number of the heads' group; -1: heads of several groups, or none.
    place: the head's place in its group; -1: several heads.
    """

    group: Tensor
    place: Tensor

    @property
    def complete(self) -> bool:
        return bool((self.group >= 0).all())

    def sections(self) -> list[range]:
        """Returns the runs of indices that go once through the groups, for example all q, all k and all v."""
        again = (self.group.diff() < 0).nonzero().flatten() + 1
        edges = [0, *again.tolist(), len(self.group)]
        return list(itertools.starmap(range, itertools.pairwise(edges)))

    def along(self, heads: "HeadGroups") -> Shares:
        """Returns the shares of the axis. A KV head that a rank holds more than once takes its place in each section as
        often.
        """

        def kept(share: HeadShare) -> Iterator[range]:
            queries = [share.query[at : at + share.group] for at in range(0, len(share.query), share.group)]
            for section in self.sections():
                indices = slice(section.start, section.stop)
                for kv, query in zip(share.kv, queries, strict=True):
                    places = torch.tensor([-1, *(head % heads.group for head in query)])
                    needed = (self.group[indices] == kv) & torch.isin(self.place[indices], places)
                    yield from (range(at, at + 1) for at in (needed.nonzero().flatten() + section.start).tolist())

        return tuple(joined(kept(share)) for share in heads.shares)


@dataclass(frozen=True)
class HeadGroups:
    """Query heads that share KV heads in equal groups, divided among ranks (`models.shards.head_shares`)."""

    count: int  # query heads
    kv_count: int  # KV heads
    ranks: int

    @property
    def group(self) -> int:
        return self.count // self.kv_count

    @property
    def shares(self) -> tuple[HeadShare, ...]:
        return head_shares(self.count, self.kv_count, self.ranks)

    def by_query(self, width: int = 1) -> Shares:
        """Returns the shares of rows [heads, width]."""
        return tuple((range(share.query.start * width, share.query.stop * width),) for share in self.shares)
