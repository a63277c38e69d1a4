"""The linears of queries, keys and values, recognised by what reaches the attention function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from labkit.models.derived.attention_calls import AttentionCall
from labkit.models.observed.calls import ObservedCall
from labkit.system.errors import UserError


class NotRecognised(UserError):
    """A model that computes something else than a row can say. The message says what."""


def without_copies(linears: Mapping[str, ObservedCall], attention: AttentionCall) -> AttentionCall:
    """The call with each key and value once. Some models repeat them, so that each query head has its own."""
    heads, copies, dim = attention.query.shape[1], attention.key.shape[1], attention.query.shape[-1]
    width = next(iter(linears.values())).y.shape[-1] if len(linears) == 1 else 0
    kv_heads = (width // dim - heads) // 2
    if not 0 < kv_heads < copies or copies % kv_heads:
        return attention
    key, value = (tensor[:, :: copies // kv_heads] for tensor in (attention.key, attention.value))
    for once, repeated in ((key, attention.key), (value, attention.value)):
        if not torch.equal(once.repeat_interleave(copies // kv_heads, 1), repeated):
            return attention
    return replace(attention, key=key, value=value)


def linears_of_heads(linears: Mapping[str, ObservedCall], attention: AttentionCall) -> tuple[tuple[str, ...], bool]:
    """Names of the linears of queries, keys and values, in this order, and whether one matrix has them by KV head: its
    queries, its key, its value.
    """
    first = next(iter(linears.values()), None)
    if first is None or not all(call.reads_as(first) for call in linears.values()):
        raise NotRecognised("queries, keys and values are not linears of one tensor")
    value = attention.value.transpose(1, 2).flatten(-2)
    heads, kv_heads, dim = attention.query.shape[1], attention.key.shape[1], attention.query.shape[-1]
    if len(linears) == 3:
        values = [name for name, call in linears.items() if call.y.shape == value.shape and torch.equal(call.y, value)]
        if len(values) != 1:
            raise NotRecognised("the values are no linear's output as it is")
        query, key = (name for name in linears if name != values[0])
        return (query, key, values[0]), False
    if len(linears) == 1 and first.y.shape[-1] == (heads + 2 * kv_heads) * dim:
        if torch.equal(first.y[..., -kv_heads * dim :], value):
            return tuple(linears), False
        by_kv_head = first.y.unflatten(-1, (kv_heads, heads // kv_heads + 2, dim))
        if heads % kv_heads == 0 and torch.equal(by_kv_head[..., -1, :].flatten(-2), value):
            return tuple(linears), True
    raise NotRecognised(f"linears before the attention ({len(linears)}) in an order that no row has")


def before_rotation(
    names: tuple[str, ...],
    linears: Mapping[str, ObservedCall],
    norms: Mapping[str, ObservedCall],
    attention: AttentionCall,
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Queries and keys [T, heads, D] of the second sequence before the rotation, and the names of their norms."""
    heads, kv_heads, dim = attention.query.shape[1], attention.key.shape[1], attention.query.shape[-1]
    if len(names) == 3:
        parts = {"query": linears[names[0]].y, "key": linears[names[1]].y}
    else:
        whole = linears[names[0]].y
        sizes = [heads * dim, kv_heads * dim, kv_heads * dim]
        parts = dict(zip(("query", "key"), whole.split(sizes, dim=-1), strict=False))
        if not torch.equal(whole[..., -kv_heads * dim :], attention.value.transpose(1, 2).flatten(-2)):
            by_kv_head = whole.unflatten(-1, (kv_heads, heads // kv_heads + 2, dim))
            parts = {"query": by_kv_head[..., :-2, :].flatten(-3), "key": by_kv_head[..., -2, :].flatten(-2)}
    used = {}
    for name, part in parts.items():
        for norm, call in norms.items():
            if call.x.numel() == part.numel() and torch.equal(_rows_of(call.x, part.shape, dim), part):
                used[f"{name[0]}_norm"], parts[name] = norm, _rows_of(call.y, part.shape, dim)
    # A norm after the rotation is one before it if it has no weights: the rotation keeps lengths.
    for name, part in parts.items():
        turned = (attention.query if name == "query" else attention.key).transpose(1, 2)
        for norm, call in norms.items() if f"{name[0]}_norm" not in used else ():
            if call.y.numel() == part.numel() and torch.equal(_rows_of(call.y, part.shape, dim), turned.flatten(-2)):
                rows = part.unflatten(-1, (-1, dim))
                used[f"{name[0]}_norm"] = norm
                parts[name] = (rows * (turned.norm(dim=-1) / rows.norm(dim=-1))[..., None]).flatten(-2)
    return {name: part[1].unflatten(-1, (-1, dim)) for name, part in parts.items()}, used


def _rows_of(tensor: Tensor, shape: torch.Size, dim: int) -> Tensor:
    """A tensor of heads, [B, T, heads, D] or [B, heads, T, D], as [B, T, heads * D]."""
    if tensor.dim() == 4 and tensor.shape[1] != shape[1]:
        tensor = tensor.transpose(1, 2)
    return tensor.reshape(shape)
