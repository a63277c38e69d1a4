"""Marks for tests of the Triton kernels: on a GPU, or in Triton's interpreter if there is no GPU.

With a GPU, TRITON_INTERPRET=1 chooses the interpreter. Test files that import this module are skipped without Triton.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers.kernels.interpreter import speed_up_interpreter

from labkit.kernels import gpu

pytest.importorskip("triton")
if gpu.interpreted():
    speed_up_interpreter()
INTERPRETED = [
    pytest.mark.skipif(not gpu.interpreted(), reason="runs in Triton's interpreter; set TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),  # a sigmoid is 0 there
]
ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(gpu.interpreted() or not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def marked(marks: Sequence[pytest.MarkDecorator]) -> Callable[[Any], Any]:
    """Returns a decorator that gives a test all of `marks`."""

    def with_marks(test: Any) -> Any:
        for mark in marks:
            test = mark(test)
        return test

    return with_marks


interpreted = marked([pytest.mark.usefixtures("poisoned"), *INTERPRETED])
on_gpu = marked(ON_GPU)
