"""Shares of heads and features by rank."""

import itertools

import pytest
import torch

from labkit.engine.parallel.slicing.shares import Features, HeadGroups, length, take
from labkit.models.shards import evenly

GROUPINGS = [(heads, kv) for heads in (1, 2, 4, 5, 6, 12) for kv in range(1, heads + 1) if heads % kv == 0]
CASES = [(*grouping, ranks) for grouping in GROUPINGS for ranks in (1, 2, 3, 4, 5) if ranks <= grouping[0]]
SIZE = 3


def rows(parts: list[tuple[str, int]]) -> torch.Tensor:
    """Label for each row of a fused matrix: kind, head and place in the head as one number."""
    labels = [1000 * "qkv".index(kind) + 10 * head + place for kind, head in parts for place in range(SIZE)]
    return torch.tensor(labels)


def local_order(heads: HeadGroups, rank: int) -> tuple[list[int], list[int]]:
    share = heads.shares[rank]
    return list(share.query), list(share.kv)


def test_the_first_ranks_take_one_more() -> None:
    assert [len(keep) for keep in evenly(11, 4)] == [3, 3, 3, 2]


@pytest.mark.parametrize(("heads", "kv", "ranks"), CASES)
def test_each_query_head_is_kept_once_and_meets_its_own_kv_head(heads: int, kv: int, ranks: int) -> None:
    shared = HeadGroups(heads, kv, SIZE, ranks)
    assert list(itertools.chain(*(share.query for share in shared.shares))) == list(range(heads))
    for share in shared.shares:
        assert len(share.query) == share.group * len(share.kv)
        for place, query in enumerate(share.query):
            assert share.kv[place // share.group] == query // shared.group


@pytest.mark.parametrize(("heads", "kv", "ranks"), CASES)
def test_kv_heads_are_held_once_where_there_are_enough(heads: int, kv: int, ranks: int) -> None:
    kept = list(itertools.chain(*(share.kv for share in HeadGroups(heads, kv, SIZE, ranks).shares)))
    assert kept == list(range(kv)) if kv >= ranks else set(kept) == set(range(kv))


@pytest.mark.parametrize(("heads", "kv", "ranks"), CASES)
def test_a_share_of_stacked_rows_is_the_stack_of_its_heads(heads: int, kv: int, ranks: int) -> None:
    shared = HeadGroups(heads, kv, SIZE, ranks)

    def stack(queries: list[int], keys: list[int]) -> torch.Tensor:
        return rows([("q", head) for head in queries] + [(kind, head) for kind in "kv" for head in keys])

    whole = stack(list(range(heads)), list(range(kv)))
    for rank, share in enumerate(shared.stacked("qkv")):
        assert torch.equal(take(whole, 0, share), stack(*local_order(shared, rank)))


@pytest.mark.parametrize(("heads", "kv", "ranks"), CASES)
def test_a_share_of_grouped_rows_is_the_groups_of_its_heads(heads: int, kv: int, ranks: int) -> None:
    shared = HeadGroups(heads, kv, SIZE, ranks)

    def groups(queries: list[int], keys: list[int]) -> torch.Tensor:
        queries_per_key = len(queries) // len(keys)
        return rows(
            [
                part
                for place, key in enumerate(keys)
                for part in [
                    *(("q", q) for q in queries[place * queries_per_key : (place + 1) * queries_per_key]),
                    ("k", key),
                    ("v", key),
                ]
            ]
        )

    whole = groups(list(range(heads)), list(range(kv)))
    for rank, share in enumerate(shared.grouped()):
        assert torch.equal(take(whole, 0, share), groups(*local_order(shared, rank)))


@pytest.mark.parametrize("count", [5, 48, 56, 11008])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_gate_and_up_are_cut_alike(count: int, ranks: int) -> None:
    features = Features(count, ranks)
    gate, up = torch.arange(count), torch.arange(count) + 100_000
    stacked = [take(torch.cat([gate, up]), 0, share).chunk(2) for share in features.contiguous(2)]
    mixed = [take(torch.stack([gate, up], 1).flatten(), 0, share).view(-1, 2).T for share in features.interleaved(2)]
    for cut in (stacked, mixed):
        assert torch.equal(torch.cat([first for first, _ in cut]), gate)
        assert torch.equal(torch.cat([second for _, second in cut]), up)


def test_features_are_shared_in_pieces_that_gemms_like() -> None:
    assert [length(share) for share in Features(11008, 3).contiguous()] == [3712, 3648, 3648]
    assert [length(share) for share in Features(48, 4).contiguous()] == [16, 16, 8, 8]
    assert [length(share) for share in Features(7, 3).contiguous()] == [3, 2, 2]
