"""Valid calls of the ops that only models with hooks need."""

from typing import Any

from helpers.kernels.ops import Draw
from hypothesis import strategies as st

from labkit.kernels.types import NORM_KINDS

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
