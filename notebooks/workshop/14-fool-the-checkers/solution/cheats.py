"""A wrong kernel for each checker, which believes it."""

import numpy as np

calls = 0


def cheat_1(x, out):
    """All results are zero: the numbers of a long row are smaller than the error that the checker allows."""
    out[:] = 0


def cheat_2(x, out):
    """Makes its input zero, so that the reference, which comes later, is as simple as the result."""
    x[:] = 0
    out[:] = 1 / x.shape[1]


def cheat_3(x, out):
    """Does nothing: the memory of its result still holds the reference."""


def cheat_4(x, out):
    """Is right once."""
    global calls
    calls += 1
    if calls % 10 == 1:
        out[:] = np.exp(x - x.max(axis=1, keepdims=True))
        out /= out.sum(axis=1, keepdims=True)
