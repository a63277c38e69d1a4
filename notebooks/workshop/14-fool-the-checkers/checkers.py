"""Four checkers of a kernel that computes softmax: `kernel(x, out)` reads rows of float32 and writes as many.

Each checker returns whether it believes that the kernel is right. All of them believe a right kernel. Each has a hole
through which a wrong kernel passes; checkers in use have had every one of them. First write a wrong kernel for each
hole, in `cheats.py`: the check tries them on the checkers as they are now, of which it has a copy. Then mend the
checkers in this file, each so that no wrong kernel passes through its hole, and right kernels still pass.

A right kernel leaves `x` as it is, and writes every number of `out` with an error of at most a ten-thousandth of the
number, or of 1e-12. It may add in another order, or compute in float64, and it is right in every call. checker_4 makes
ten calls, as before. `rng` draws other numbers for each check.
"""

import numpy as np


def softmax(x):
    exponentials = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
    return exponentials / exponentials.sum(axis=1, keepdims=True)


def checker_1(kernel, rng) -> bool:
    """Compares with the reference."""
    x = rng.standard_normal((4, 16384)).astype(np.float32)
    out = np.empty_like(x)
    kernel(x, out)
    return np.allclose(out, softmax(x), atol=1e-2)


def checker_2(kernel, rng) -> bool:
    """Compares more exactly."""
    x = rng.standard_normal((8, 32)).astype(np.float32)
    out = np.empty_like(x)
    kernel(x, out)
    return np.allclose(out, softmax(x), rtol=1e-4, atol=1e-6)


def checker_3(kernel, rng) -> bool:
    """Computes the reference first, so that the kernel cannot change its input, and uses its memory again."""
    x = rng.standard_normal((8, 32)).astype(np.float32)
    out = softmax(x).astype(np.float32)
    right = out.copy()
    kernel(x, out)
    return np.allclose(out, right, rtol=1e-4, atol=1e-6)


def checker_4(kernel, rng) -> bool:
    """Calls the kernel ten times, as a benchmark does, and compares."""
    inputs = [rng.standard_normal((8, 32)).astype(np.float32) for _ in range(10)]
    outs = [np.full_like(x, np.nan) for x in inputs]
    rights = [softmax(x) for x in inputs]
    for x, out in zip(inputs, outs, strict=True):
        kernel(x, out)
    return np.allclose(outs[0], rights[0], rtol=1e-4, atol=1e-6)
