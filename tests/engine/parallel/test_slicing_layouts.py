"""Layouts that are read from toy blocks of random shapes."""

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from labkit.engine.parallel.slicing import Kind, Unit, plan_slicing
from labkit.engine.parallel.slicing.shares import features, take
from labkit.models.shards import head_shares

HIDDEN, GATES = 20, 2
LAYOUTS = ("apart", "stacked", "by KV head")


class FusedAttention(nn.Module):
    """Attention with q, k and v apart, or fused as [all q, all k, all v] or as [KV heads, queries, key, value]."""

    def __init__(self, heads: int, kv_heads: int, size: int, layout: str) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim, self.layout = heads, kv_heads, size, layout
        widths = [heads * size, kv_heads * size, kv_heads * size]
        self.inputs = nn.ModuleList(nn.Linear(HIDDEN, n) for n in (widths if layout == "apart" else [sum(widths)]))
        self.bias = nn.Parameter(torch.zeros(heads))
        self.out = nn.Linear(heads * size, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        group = self.num_heads // self.num_kv_heads
        fused = [linear(x) for linear in self.inputs]
        if self.layout == "by KV head":
            by_kv = fused[0].unflatten(-1, (self.num_kv_heads, group + 2, self.head_dim))
            q, k, v = by_kv[..., :-2, :].flatten(2, 3), by_kv[..., -2, :], by_kv[..., -1, :]
        else:
            counts = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
            parts = fused if len(fused) > 1 else fused[0].split([n * self.head_dim for n in counts], -1)
            q, k, v = (part.unflatten(-1, (n, self.head_dim)) for part, n in zip(parts, counts, strict=True))
        k, v = (part.repeat_interleave(group, 2) for part in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * self.head_dim**-0.5 + self.bias[:, None, None]
        gate = scores.logsumexp(-1).sigmoid().transpose(1, 2)[..., None]
        attended: Tensor = self.out((torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v) * gate).flatten(2))
        return attended


class FusedMLP(nn.Module):
    """MLP with gate and up in one matrix, one above the other or row by row."""

    def __init__(self, width: int, interleaved: bool) -> None:
        super().__init__()
        self.interleaved = interleaved
        self.gate_up, self.down = nn.Linear(HIDDEN, GATES * width), nn.Linear(width, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        fused = self.gate_up(x)
        gate, up = (fused[..., ::2], fused[..., 1::2]) if self.interleaved else fused.chunk(GATES, -1)
        down: Tensor = self.down(gate.relu() * up)
        return down


class OneBlock(nn.Module):
    """Model of one block in a residual stream."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Residual(block)])

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers[0](x)
        return y


class Residual(nn.Module):
    """x + inner(x)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.inner(x)
        return y


def unit_of(block: nn.Module, ranks: int) -> Unit:
    plan = plan_slicing(OneBlock(block), ranks, example={"x": torch.randn(3, 5, HIDDEN)})
    (unit,) = plan.blocks[0].units
    return unit


def rows(queries: Any, keys: Any, size: int, layout: str) -> list[Tensor]:
    """Labels of the rows of each matrix, for these query heads and KV heads."""
    q, k, v = (
        [1000 * kind + torch.arange(size) + size * head for head in heads]
        for kind, heads in enumerate((queries, keys, keys))
    )
    if layout != "by KV head":
        parts = [torch.cat(part) for part in (q, k, v)]
        return parts if layout == "apart" else [torch.cat(parts)]
    group = len(q) // len(k)
    return [torch.cat([part for at in range(len(k)) for part in (*q[at * group : (at + 1) * group], k[at], v[at])])]


@settings(max_examples=12, deadline=None)
@given(data=st.data(), kv=st.integers(1, 4), group=st.integers(1, 4), size=st.sampled_from([2, 3, 8]))
def test_heads_are_read_whatever_their_number_and_layout(data: st.DataObject, kv: int, group: int, size: int) -> None:
    heads = kv * group
    if heads < 2:
        return
    layout, ranks = data.draw(st.sampled_from(LAYOUTS)), data.draw(st.integers(2, min(heads, 4)))
    unit = unit_of(FusedAttention(heads, kv, size, layout), ranks)
    shares = head_shares(heads, kv, ranks)
    assert unit.kind == Kind.ATTENTION
    assert unit.heads == tuple(len(share.query) for share in shares)
    assert unit.kv_heads == tuple(len(share.kv) for share in shares)
    assert [cut.name for cut in unit.tensors] == ["inner.bias"]
    whole = rows(range(heads), range(kv), size, layout)
    for rank, share in enumerate(shares):
        kept = [take(label, 0, cut.shares[rank]) for label, cut in zip(whole, unit.linears, strict=False)]
        expected = rows(share.query, share.kv, size, layout)
        assert all(torch.equal(*pair) for pair in zip(kept, expected, strict=True))


@settings(max_examples=6, deadline=None)
@given(width=st.integers(3, 200), interleaved=st.booleans(), ranks=st.integers(2, 3))
def test_gate_and_up_are_read_stacked_or_interleaved(width: int, interleaved: bool, ranks: int) -> None:
    unit = unit_of(FusedMLP(width, interleaved), ranks)
    assert unit.linears[0].shares == features(width, ranks, GATES, interleaved=interleaved)
    assert unit.linears[1].shares == features(width, ranks)
