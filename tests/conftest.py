"""What tests of kernels and engine share: each instruction set in turn, memory that starts as NaN, one thread.

Without a GPU the Triton kernels run in Triton's interpreter, which reads its switch as they are defined. Threads of
OpenMP sleep while they wait, here and in the processes that tests start: several processes share the processors, and
threads that spin would take them from each other. OpenMP reads that when torch loads it.
"""

import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import ops
import pytest
import torch
from sweeps import swept

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    # PyTorch's CUDA build warns of a driver that is too old for it, in every process whose output a test compares.
    os.environ["PYTHONWARNINGS"] = ",".join(
        filter(None, [os.environ.get("PYTHONWARNINGS"), "ignore:CUDA initialization"])
    )
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end. Each measured run collects garbage, and would look at it."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny tensors are not worth a second thread of torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=swept(ops.ISAS, ["amx", "avx512", "portable"]))
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernels are built for this instruction set; skipped where the CPU has it not."""
    if reason := ops.missing_instructions(request.param):
        pytest.skip(reason)
    monkeypatch.setenv("LABKIT_ISA", request.param)
    return request.param


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory from torch.empty reads as NaN in any float type, also where it is cut from bytes (the workspace)."""

    def poison(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def filled(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            if tensor.is_floating_point():
                return tensor.fill_(float("nan"))
            return tensor.fill_(255) if tensor.dtype == torch.uint8 else tensor

        return filled

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poison(getattr(torch, name)))
