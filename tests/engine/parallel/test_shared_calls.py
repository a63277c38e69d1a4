"""A failure on one rank fails on all ranks with its reason, and the next call works."""

import gc
import weakref

import pytest
import torch
from helpers.ranks.failing_ranks import KINDS, check_told, told
from helpers.sweeps import sweep

import labkit
from labkit.engine.parallel.shared_calls import SharedCalls
from labkit.kernels.other_ranks import RankFailedError, UnexplainedError

pytestmark = pytest.mark.timeout(300)


@sweep
@pytest.mark.parametrize(
    ("pp_size", "tp_size", "kinds"),
    [
        pytest.param(1, 2, tuple(KINDS), id="two ranks"),
        pytest.param(2, 1, tuple(KINDS), id="two stages"),
        pytest.param(2, 2, ("shared memory",), id="two stages of two ranks"),
        pytest.param(3, 1, tuple(KINDS), id="three stages"),
        pytest.param(1, 3, tuple(KINDS), id="three ranks"),
    ],
)
def test_what_fails_on_one_rank_fails_on_all_and_they_go_on(pp_size: int, tp_size: int, kinds: tuple[str, ...]) -> None:
    check_told(labkit.launch(told, pp_size, tp_size, kinds, pp_size=pp_size, tp_size=tp_size, timeout_s=240))


class FailedChannel:
    """A channel whose other rank has failed in a call, and gives its reason afterwards."""

    def __init__(self) -> None:
        self.gathered = 0

    def begin_call(self) -> None:
        pass

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        self.gathered += 1
        if self.gathered == 2:
            raise RankFailedError("rank 1: ValueError: a reason")
        return x[None]

    def fail_call(self, reason: str) -> None:
        pass


def test_a_failed_call_keeps_nothing_alive() -> None:
    """Caches of a failed call have files and memory, which are free when the error has been handled."""
    calls, caches = SharedCalls([FailedChannel()]), []

    def fail() -> None:
        cache = torch.empty(1)
        caches.append(weakref.ref(cache))
        with calls.one("generate"):
            raise UnexplainedError("rank 1 has failed")

    gc.collect()
    gc.disable()
    try:
        with pytest.raises(RankFailedError, match="a reason") as raised:
            fail()
        del raised
        assert caches[0]() is None
    finally:
        gc.enable()
