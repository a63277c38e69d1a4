"""A transformer layer without norms, cut for ranks that share the work.

    y = x + attention(x)        all heads, each over its own part of q, k and v; then the output matrix
    z = y + relu(y @ up + up_bias) @ down + down_bias

Rows are tokens: x is [tokens][hidden]. q, k and v are [hidden][heads * width], o is [heads * width][hidden], up is
[hidden][inner], down is [inner][hidden]. A token attends to itself and to the tokens before it; scores are divided by
the square root of the width. `heads` and `inner` are the sums over all ranks, and multiples of their number.

The ranks work alone, except for two sums: of what `attention` writes on all ranks, and of what `mlp` writes. x and y
are added outside of these functions, once.

`cut` writes a rank's part of the weights into `mine`. It has room for 1/ranks of each matrix and of up_bias, and for
one whole down_bias. In a rank's process nothing else is left of the weights.

This version is right for one rank.
"""

import numpy as np


def cut(rank, ranks, heads, q, k, v, o, up, up_bias, down, down_bias, mine) -> None:
    """Writes this rank's part of all weights, one after the other, into `mine`."""
    parts = (q, k, v, o, up, up_bias, down, down_bias)
    everything = np.concatenate([part.reshape(-1) for part in parts])
    mine[:] = everything[: mine.size]


def attention(rank, ranks, heads, width, inner, x, mine, out) -> None:
    """Writes this rank's part of attention(x), [tokens][hidden], into `out`."""
    hidden, columns = x.shape[1], heads * width
    q, k, v, o, *_ = parts_of(mine, hidden, columns, inner)
    out[:] = 0
    for head in range(heads):
        of_head = slice(head * width, (head + 1) * width)
        scores = (x @ q[:, of_head]) @ (x @ k[:, of_head]).T / np.sqrt(width)
        scores[np.triu_indices(len(x), 1)] = -np.inf
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        out += weights @ (x @ v[:, of_head]) @ o[of_head]


def mlp(rank, ranks, heads, width, inner, y, mine, out) -> None:
    """Writes this rank's part of the MLP's output for y, [tokens][hidden], into `out`."""
    *_, up, up_bias, down, down_bias = parts_of(mine, y.shape[1], heads * width, inner)
    out[:] = np.maximum(y @ up + up_bias, 0) @ down + down_bias


def parts_of(mine, hidden, columns, inner):
    """The matrices in `mine`, whose q, k and v have `columns`, and whose up has `inner` columns."""
    shapes = [(hidden, columns)] * 3 + [(columns, hidden), (hidden, inner), (inner,), (inner, hidden), (hidden,)]
    ends = np.cumsum([np.prod(shape) for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(np.split(mine[: ends[-1]], ends[:-1]), shapes, strict=True)]
