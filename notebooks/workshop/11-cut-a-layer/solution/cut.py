"""A transformer layer without norms, cut for ranks that share the work.

q, k, v and up are cut by columns: a rank has whole heads, and whole columns of the MLP, so it needs nothing from the
others until the second matrix. o and down are cut by the rows that belong to these columns. Each rank then has a part
of every output, and the sum over the ranks is the whole. A bias that is added after the second matrix belongs to the
sum: one rank adds it.
"""

import numpy as np


def cut(rank, ranks, heads, q, k, v, o, up, up_bias, down, down_bias, mine) -> None:
    """Writes this rank's part of all weights, one after the other, into `mine`."""
    columns, inner = share(rank, ranks, q.shape[1]), share(rank, ranks, up.shape[1])
    parts = (
        q[:, columns], k[:, columns], v[:, columns], o[columns],
        up[:, inner], up_bias[inner], down[inner], down_bias,
    )  # fmt: skip
    mine[:] = np.concatenate([part.reshape(-1) for part in parts])


def share(rank, ranks, count):
    """The columns of this rank."""
    return slice(rank * count // ranks, (rank + 1) * count // ranks)


def attention(rank, ranks, heads, width, inner, x, mine, out) -> None:
    """Writes this rank's part of attention(x), [tokens][hidden], into `out`."""
    own_heads = heads // ranks
    q, k, v, o, *_ = parts_of(mine, x.shape[1], own_heads * width, inner // ranks)
    out[:] = 0
    for head in range(own_heads):
        of_head = slice(head * width, (head + 1) * width)
        scores = (x @ q[:, of_head]) @ (x @ k[:, of_head]).T / np.sqrt(width)
        scores[np.triu_indices(len(x), 1)] = -np.inf
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        out += weights @ (x @ v[:, of_head]) @ o[of_head]


def mlp(rank, ranks, heads, width, inner, y, mine, out) -> None:
    """Writes this rank's part of the MLP's output for y, [tokens][hidden], into `out`."""
    *_, up, up_bias, down, down_bias = parts_of(mine, y.shape[1], heads // ranks * width, inner // ranks)
    out[:] = np.maximum(y @ up + up_bias, 0) @ down
    if rank == 0:
        out += down_bias


def parts_of(mine, hidden, columns, inner):
    """The matrices in `mine`, whose q, k and v have `columns`, and whose up has `inner` columns."""
    shapes = [(hidden, columns)] * 3 + [(columns, hidden), (hidden, inner), (inner,), (inner, hidden), (hidden,)]
    ends = np.cumsum([np.prod(shape) for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(np.split(mine[: ends[-1]], ends[:-1]), shapes, strict=True)]
