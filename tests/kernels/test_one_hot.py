"""Rows to their experts and back: one-hot products and a table give the same sums."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit.kernels.experts.one_hot import through_one_hot, through_table


@given(rows=st.integers(1, 40), experts=st.integers(1, 12), data=st.data())
def test_both_ways_give_the_shares_of_each_row(rows: int, experts: int, data: st.DataObject) -> None:
    chosen_of_a_row = data.draw(st.integers(1, experts))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    hidden = torch.randn(rows, 5, generator=generator)
    chosen = torch.stack([torch.randperm(experts, generator=generator)[:chosen_of_a_row] for _ in range(rows)])
    shares = torch.rand(rows, chosen_of_a_row, generator=generator)
    expected = hidden * shares.sum(1, keepdim=True)
    for way in (through_one_hot, through_table):
        torch.testing.assert_close(way(hidden, chosen, shares, experts), expected)
