"""Four checkers without these holes. They differ in what they try; all compare in the same way.

The reference comes first, and the kernel gets a copy of the input. The result is filled with NaN, so what is not
written is wrong. Errors are relative to the numbers themselves, and every result of every call counts.
"""

import numpy as np


def softmax(x):
    exponentials = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
    return exponentials / exponentials.sum(axis=1, keepdims=True)


def is_right(kernel, inputs) -> bool:
    """Whether all results are right, and no input was changed."""
    rights, copies = [softmax(x) for x in inputs], [x.copy() for x in inputs]
    outs = [np.full_like(x, np.nan) for x in inputs]
    for x, out in zip(copies, outs, strict=True):
        kernel(x, out)
    unchanged = all(np.array_equal(x, copy) for x, copy in zip(inputs, copies, strict=True))
    close = all(np.allclose(out, right, rtol=1e-4, atol=1e-12) for out, right in zip(outs, rights, strict=True))
    return unchanged and close


def rows(rng, count, columns):
    return rng.standard_normal((count, columns)).astype(np.float32)


def checker_1(kernel, rng) -> bool:
    """Long rows."""
    return is_right(kernel, [rows(rng, 4, 1024), rows(rng, 3, 777)])


def checker_2(kernel, rng) -> bool:
    """Rows of several widths."""
    return is_right(kernel, [rows(rng, 8, 32), rows(rng, 1, 33), rows(rng, 5, 1)])


def checker_3(kernel, rng) -> bool:
    """Large scores."""
    return is_right(kernel, [rows(rng, 8, 32) * 50, rows(rng, 8, 32) - 100])


def checker_4(kernel, rng) -> bool:
    """Many calls."""
    return is_right(kernel, [rows(rng, 8, 32) for _ in range(10)])
