"""Attention of one new token in Triton: a loop over blocks of keys, with a running maximum and running sums."""

import triton
import triton.language as tl


@triton.jit
def attention_kernel(q, k, v, out, tokens, scale, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    head = tl.program_id(0)
    columns = tl.arange(0, WIDTH)
    query = tl.load(q + head * WIDTH + columns)
    most = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    added = tl.zeros([WIDTH], tl.float32)

    for begin in range(0, tokens, BLOCK):
        rows = begin + tl.arange(0, BLOCK)
        there = rows < tokens
        places = head * tokens * WIDTH + rows[:, None] * WIDTH + columns[None, :]
        keys = tl.load(k + places, mask=there[:, None], other=0.0)
        values = tl.load(v + places, mask=there[:, None], other=0.0)

        scores = tl.where(there, tl.sum(keys * query[None, :], axis=1) * scale, float("-inf"))
        block_most = tl.maximum(most, tl.max(scores, axis=0))
        correction = tl.exp(most - block_most)
        weights = tl.exp(scores - block_most)
        total = total * correction + tl.sum(weights, axis=0)
        added = added * correction + tl.sum(weights[:, None] * values, axis=0)
        most = block_most

    tl.store(out + head * WIDTH + columns, added / total)
