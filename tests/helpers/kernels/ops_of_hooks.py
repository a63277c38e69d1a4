"""Valid calls of the ops of hooks and of experts."""

from typing import Any

import torch
from helpers.kernels.ops import Draw
from hypothesis import strategies as st

from labkit.kernels.experts import ExpertMlps
from labkit.kernels.route import Router
from labkit.kernels.types import NO_NORM, NORM_KINDS, PLAIN_ACTIVATIONS, MlpWeights

WIDTH = 36
Arguments = dict[str, Any]


def for_norm_rows(data: st.DataObject) -> Arguments:
    draw, rows = Draw(), data.draw(st.sampled_from([1, 5]))
    norm = draw.norm(data.draw(st.sampled_from(NORM_KINDS)), WIDTH)
    return {"x": draw.normal(rows, WIDTH), "norm": norm, "gate": draw.normal(rows, WIDTH)}


def for_delta_step(data: st.DataObject) -> Arguments:
    draw, batch, keys, values = Draw(), *(data.draw(st.integers(1, most)) for most in (2, 9, 40))
    key_heads, heads = data.draw(st.sampled_from([(1, 1), (2, 4), (3, 3)]))
    return {
        "q": draw.normal(batch, key_heads, keys),
        "k": draw.normal(batch, key_heads, keys),
        "v": draw.normal(batch, heads, values),
        "log_decay": -draw.normal(batch, heads).abs(),
        "beta": draw.normal(batch, heads).sigmoid(),
        "state": draw.normal(batch, heads, keys, values),
        "normed": data.draw(st.booleans()),
    }


def for_experts(data: st.DataObject) -> Arguments:
    draw, rows, choices = Draw(), data.draw(st.sampled_from([1, 5])), data.draw(st.sampled_from([1, 3]))
    gated, activation = data.draw(st.booleans()), data.draw(st.sampled_from(PLAIN_ACTIVATIONS))
    regions = tuple(MlpWeights(NO_NORM, draw.linear(48, WIDTH, gated=gated)[1], activation, gated) for _ in range(3))
    outs = tuple(draw.linear(WIDTH + 2, 48)[1] for _ in range(3))
    return {
        "hidden": draw.normal(rows, WIDTH),
        "chosen": torch.tensor([data.draw(st.permutations(range(4)))[:choices] for _ in range(rows)]),
        "shares": draw.normal(rows, choices),
        "weights": ExpertMlps(regions, outs),
    }


def for_route(data: st.DataObject) -> Arguments:
    draw, rows, kinds = Draw(), data.draw(st.sampled_from([1, 5])), st.sampled_from(NORM_KINDS)
    norms = [draw.norm(data.draw(kinds), WIDTH) for _ in range(2)]
    return {
        "hidden": draw.normal(rows, WIDTH),
        "addend": draw.normal(rows, WIDTH),
        "addend_bias": draw.normal(WIDTH),
        "router": Router(norms[0], draw.linear(7, WIDTH)[1], 3, data.draw(st.booleans()), norms[1]),
    }
