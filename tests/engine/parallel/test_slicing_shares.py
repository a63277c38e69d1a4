"""Shares of heads and features by rank."""

import itertools
from collections.abc import Callable

import pytest
import torch

from labkit.engine.parallel.slicing.shares import HeadGroups, Owners, features, lengths, take
from labkit.models.shards import evenly

GROUPINGS = [(heads, kv) for heads in (1, 2, 4, 5, 6, 12) for kv in range(1, heads + 1) if heads % kv == 0]
CASES = [(*grouping, ranks) for grouping in GROUPINGS for ranks in (1, 2, 3, 4, 5) if ranks <= grouping[0]]
SIZE = 3
Row = tuple[str, int]  # kind and head
Layout = Callable[[list[int], list[int]], list[Row]]


def labels(parts: list[Row]) -> torch.Tensor:
    """Label for each row of a fused matrix: kind, head and place in the head as one number."""
    return torch.tensor([1000 * "qkv".index(kind) + 10 * head + at for kind, head in parts for at in range(SIZE)])


def owners(parts: list[Row], group: int) -> Owners:
    """Owners of the rows: query heads have rows of their own, KV heads share theirs with a group."""
    of_group = [head // group if kind == "q" else head for kind, head in parts for _ in range(SIZE)]
    places = [head % group if kind == "q" else -1 for kind, head in parts for _ in range(SIZE)]
    return Owners(torch.tensor(of_group), torch.tensor(places))


def stacked(queries: list[int], keys: list[int]) -> list[Row]:
    return [("q", head) for head in queries] + [(kind, head) for kind in "kv" for head in keys]


def grouped(queries: list[int], keys: list[int]) -> list[Row]:
    per_key = len(queries) // len(keys)
    return [
        part
        for place, key in enumerate(keys)
        for part in [*(("q", q) for q in queries[place * per_key : (place + 1) * per_key]), ("k", key), ("v", key)]
    ]


def test_the_first_ranks_take_one_more() -> None:
    assert [len(keep) for keep in evenly(11, 4)] == [3, 3, 3, 2]


@pytest.mark.parametrize(("heads", "kv", "ranks"), CASES)
def test_each_query_head_is_kept_once_and_meets_its_own_kv_head(heads: int, kv: int, ranks: int) -> None:
    shared = HeadGroups(heads, kv, ranks)
    assert list(itertools.chain(*(share.query for share in shared.shares))) == list(range(heads))
    for share in shared.shares:
        assert len(share.query) == share.group * len(share.kv)
        for place, query in enumerate(share.query):
            assert share.kv[place // share.group] == query // shared.group


@pytest.mark.parametrize(("heads", "kv", "ranks"), CASES)
def test_kv_heads_are_held_once_where_there_are_enough(heads: int, kv: int, ranks: int) -> None:
    kept = list(itertools.chain(*(share.kv for share in HeadGroups(heads, kv, ranks).shares)))
    assert kept == list(range(kv)) if kv >= ranks else set(kept) == set(range(kv))


@pytest.mark.parametrize("layout", [stacked, grouped])
@pytest.mark.parametrize(("heads", "kv", "ranks"), CASES)
def test_a_share_of_fused_rows_is_the_same_layout_of_its_heads(layout: Layout, heads: int, kv: int, ranks: int) -> None:
    shared = HeadGroups(heads, kv, ranks)
    whole = layout(list(range(heads)), list(range(kv)))
    for share, rows in zip(shared.shares, owners(whole, shared.group).along(shared), strict=True):
        expected = labels(layout(list(share.query), list(share.kv)))
        assert torch.equal(take(labels(whole), 0, rows), expected)


@pytest.mark.parametrize("count", [5, 48, 56, 11008])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_gate_and_up_are_cut_alike(count: int, ranks: int) -> None:
    gate, up = torch.arange(count), torch.arange(count) + 100_000
    stacks = [take(torch.cat([gate, up]), 0, share).chunk(2) for share in features(count, ranks, 2)]
    interleaved = features(count, ranks, 2, interleaved=True)
    mixed = [take(torch.stack([gate, up], 1).flatten(), 0, share).view(-1, 2).T for share in interleaved]
    for cut in (stacks, mixed):
        assert torch.equal(torch.cat([first for first, _ in cut]), gate)
        assert torch.equal(torch.cat([second for _, second in cut]), up)


def test_features_are_shared_in_pieces_that_gemms_like() -> None:
    assert lengths(features(11008, 3)) == (3712, 3648, 3648)
    assert lengths(features(48, 4)) == (16, 16, 8, 8)
    assert lengths(features(7, 3)) == (3, 2, 2)
