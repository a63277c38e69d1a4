"""What every test of an op runs under: each instruction set in turn, and outputs that start as NaN."""

from collections.abc import Callable, Iterator
from typing import Any

import ops
import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors are not worth a second thread of torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=ops.ISAS)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernels are built for this instruction set; skipped where the CPU has it not."""
    if reason := ops.missing_instructions(request.param):
        pytest.skip(reason)
    monkeypatch.setenv("LABKIT_ISA", request.param)
    return request.param


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory from torch.empty and torch.empty_like holds NaN, so that what an op leaves unwritten shows."""

    def poison(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def filled(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return filled

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poison(getattr(torch, name)))
