"""What each of three ranks does in the tests of sums over ranks. `labkit.launch` calls these functions."""

import ctypes
import subprocess

import pytest
import torch
import torch.distributed as dist

from labkit.kernels.all_reduce import Exchange, all_gather, all_reduce

RANKS, SLOT = 3, 4096


def all_answers() -> tuple[list[torch.Tensor], bool, list[str]]:
    return sums(), unchanged_after_a_failure(), named()


def sums() -> list[torch.Tensor]:
    """Sums by each transport: of less than a slot, of several slots, and of an odd number of values."""
    totals = []
    for transport in ("shared memory", "gloo"):
        exchange = Exchange(None, SLOT, transport=transport if transport == "gloo" else None)
        assert exchange.transport == transport
        for count in (1, 63, 1024, 5000):
            x = torch.randn(count, generator=torch.Generator().manual_seed(dist.get_rank()))
            total = all_reduce(x, exchange, impl="cpp")
            assert torch.allclose(total, all_reduce(x, exchange, impl="reference"), atol=1e-6)
            gathered = all_gather(x, exchange, impl="cpp")
            assert torch.equal(gathered, all_gather(x, exchange, impl="reference"))
            assert torch.equal(total, gathered[0] + gathered[1] + gathered[2])
            totals.append(total)
    return totals


def unchanged_after_a_failure() -> bool:
    """Whether the slots of all ranks are unchanged after rank 1 failed and made further calls."""
    exchange = Exchange(None, SLOT)
    for value in (1.0, 2.0):
        all_reduce(torch.full((1024,), value), exchange, impl="cpp")
    assert exchange.c.slots is not None
    slots = (ctypes.c_char * (2 * RANKS * SLOT)).from_address(exchange.c.slots)
    before = bytes(slots)
    dist.barrier()
    if dist.get_rank() == 1:
        exchange.c.failure = 1
        for operation in (all_reduce, all_gather):
            for _ in range(2):
                with pytest.raises(RuntimeError):
                    operation(torch.full((1024,), 3.0), exchange, impl="cpp")
    dist.barrier()
    return bytes(slots) == before


def named() -> list[str]:
    """Messages on rank 0 about rank 1: one if rank 1 has ended, one if it is late."""
    messages = []
    for ended in (True, False):
        exchange = Exchange(None, SLOT, timeout_s=60.0 if ended else 0.5)
        dist.barrier()  # every rank has recorded the process ids of the others
        if dist.get_rank() == 0:
            if ended:  # pretends that rank 1 is this process, which has ended
                with subprocess.Popen(["true"]) as process:
                    pass
                assert exchange.c.arrivals is not None
                ctypes.c_int32.from_address(exchange.c.arrivals + 64 + 8).value = process.pid
            with pytest.raises(RuntimeError) as failure:
                all_reduce(torch.ones(3), exchange, impl="cpp")
            messages.append(str(failure.value))
        dist.barrier()
    return messages
