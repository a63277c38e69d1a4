"""Attention of one new token in Triton, for a GPU. Without one Triton's interpreter runs it, block by block.

One program computes one head: scores of its query against all keys in the cache, softmax, and the weighted sum of the
values. `BLOCK` keys fit into the program's registers at once, so a long cache needs a loop over blocks.

The check calls the kernel itself, as `attention_kernel[(heads,)](q, k, v, out, tokens, scale, WIDTH, BLOCK)`, with
contiguous float32 tensors. WIDTH and BLOCK are powers of two:

    q [heads][WIDTH]    k, v [heads][tokens][WIDTH]    out [heads][WIDTH]

This version is right if `tokens` equals BLOCK.
"""

import triton
import triton.language as tl


@triton.jit
def attention_kernel(q, k, v, out, tokens, scale, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    head = tl.program_id(0)
    columns = tl.arange(0, WIDTH)
    rows = tl.arange(0, BLOCK)
    places = head * tokens * WIDTH + rows[:, None] * WIDTH + columns[None, :]

    query = tl.load(q + head * WIDTH + columns)
    keys = tl.load(k + places)
    values = tl.load(v + places)

    scores = tl.sum(keys * query[None, :], axis=1) * scale
    weights = tl.exp(scores - tl.max(scores, axis=0))
    result = tl.sum(weights[:, None] * values, axis=0) / tl.sum(weights, axis=0)
    tl.store(out + head * WIDTH + columns, result)
