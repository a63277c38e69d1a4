"""Any requested part of a tensor can be assembled from the pieces of its holders."""

import random
from functools import partial

import pytest
import torch

from labkit.models.shards import Cut
from labkit.weights.checkpoint.pieces import Divided, FilePart, Interval, pieces

WHOLE = 40


def partition(rng: random.Random, holders: int) -> list[tuple[Interval, ...]]:
    """Divides the whole into ranges in random order; each number has one holder or more."""
    bounds = sorted(rng.sample(range(1, WHOLE), 9))
    ranges = list(zip([0, *bounds], [*bounds, WHOLE], strict=True))
    holdings: list[list[Interval]] = [[] for _ in range(holders)]
    for interval in rng.sample(ranges, len(ranges)) + rng.sample(ranges, 3):
        holdings[rng.randrange(holders)].append(interval)
    return [tuple(ranges) for ranges in holdings]


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("dim", [0, 1])
def test_any_cut_of_a_divided_tensor_is_the_same_cut_of_the_whole(seed: int, dim: int) -> None:
    rng = random.Random(seed)
    whole = torch.arange(WHOLE * 7).view(WHOLE, 7)
    whole = whole if dim == 0 else whole.T
    holdings = [ranges for ranges in partition(rng, 4) if ranges]
    parts = [Cut(dim, ranges, WHOLE)(whole) for ranges in holdings]
    file_parts = (FilePart(partial(torch.clone, part), ranges) for part, ranges in zip(parts, holdings, strict=True))
    tensor = Divided(tuple(whole.shape), dim, tuple(file_parts))
    bounds = sorted(rng.sample(range(WHOLE + 1), 4))
    along = Cut(dim, ((bounds[2], bounds[3]), (bounds[0], bounds[1])), WHOLE)
    across = Cut(1 - dim, ((2, 5),), 7)
    assert torch.equal(tensor.get(), whole)
    assert torch.equal(tensor.get(along), along(whole))
    assert torch.equal(tensor.get(across), across(whole))


def test_what_one_holder_has_in_one_range_is_one_piece() -> None:
    assert len(pieces(((3, 17),), [((20, 40),), ((0, 20),)])) == 1


def test_what_nobody_has_is_an_error() -> None:
    with pytest.raises(ValueError, match="no holder has 5 to 9"):
        pieces(((0, 9),), [((0, 5),), ((9, 12),)])


def test_a_cut_of_another_shape_is_an_error() -> None:
    tensor = Divided((4,), 0, (FilePart(lambda: torch.zeros(4), ((0, 4),)),))
    with pytest.raises(ValueError, match=r"has shape \[4\], expected 5 in dimension 0"):
        tensor.get(Cut(0, ((0, 2),), 5))
