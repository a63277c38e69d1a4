"""Fixtures that tests of kernels and engine share: each instruction set in turn, memory full of NaN, one thread.

Without a GPU the Triton kernels run in Triton's interpreter; Triton reads that switch when a kernel is defined.
OpenMP threads sleep while they wait, in this process and in the processes that tests start: several processes share
the processors, and spinning threads would take them from each other. OpenMP reads that setting when torch loads it.
"""

import gc
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
from helpers.kernels import ops
from helpers.sweeps import swept

from labkit.statistics import kept_records

# A shell's background job ignores Ctrl-C, and so would every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    # PyTorch's CUDA build warns of a driver that is too old, also in the processes whose output tests compare.
    os.environ["PYTHONWARNINGS"] = ",".join(
        filter(None, [os.environ.get("PYTHONWARNINGS"), "ignore:CUDA initialization"])
    )
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def pytest_collection_finish() -> None:
    """Freezes imported modules and collected tests. Measured runs collect garbage, and would scan them each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_kept_records() -> Iterator[None]:
    """Hides the measured figures in the user's cache: a test that reads them depends on what ran before it."""
    with pytest.MonkeyPatch.context() as patch:  # not `monkeypatch`, which then would outlast all other fixtures
        patch.setattr(kept_records, "cache_root", lambda: None)
        yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Limits torch to one thread, because a second one does not pay off for tiny tensors."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=swept(ops.ISAS, [ops.OWN_ISA]))
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Builds the kernels for this instruction set; skips the test if the CPU lacks it."""
    if reason := ops.missing_instructions(request.param):
        pytest.skip(reason)
    monkeypatch.setenv("LABKIT_ISA", request.param)
    return request.param


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills memory from torch.empty with NaN in every float type, even if it is cut from bytes (the workspace)."""

    def poison(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def filled(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            if tensor.is_floating_point():
                return tensor.fill_(float("nan"))
            return tensor.fill_(255) if tensor.dtype == torch.uint8 else tensor

        return filled

    with torch.device("meta"):  # the first use of a device remembers torch's constructors, and must see the real ones
        torch.empty(0)
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poison(getattr(torch, name)))
