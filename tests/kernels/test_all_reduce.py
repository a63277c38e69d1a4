"""Sums and gathers over ranks: the same bits on all of them, by either transport; a rank that is missing is named."""

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import labkit
from labkit.kernels.all_reduce import Exchange, all_reduce

pytestmark = pytest.mark.timeout(120)


def in_ranks(size: int) -> Callable[[Callable[[], object]], list[object]]:
    return lambda function: labkit.launch(function, tp_size=size, timeout_s=90)


def test_sums_are_torchs_and_the_same_bits_on_every_rank() -> None:
    """Of less than a slot, of several, and of an odd number; what the slots held before does not show."""

    def sums() -> list[object]:
        import torch
        import torch.distributed as dist

        from labkit.kernels.all_reduce import Exchange, all_gather, all_reduce

        found: list[object] = []
        for transport in ("shared memory", "gloo"):
            exchange = Exchange(None, 4096, transport=transport if transport == "gloo" else None)
            assert exchange.transport == transport
            for count in (1, 63, 1024, 5000):
                x = torch.randn(count, generator=torch.Generator().manual_seed(dist.get_rank()))
                total = all_reduce(x, exchange, impl="cpp")
                wanted = all_reduce(x, exchange, impl="reference")
                assert torch.allclose(total, wanted, atol=1e-6)
                everyone = all_gather(x, exchange, impl="cpp")
                assert torch.equal(everyone, all_gather(x, exchange, impl="reference"))
                in_order = everyone[0] + everyone[1] + everyone[2]
                assert torch.equal(total, in_order)
                found.append(total)
        return found

    first, *others = in_ranks(3)(sums)
    assert isinstance(first, list)
    for other in others:
        assert isinstance(other, list)
        assert all(a.equal(b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(
    ("raised", "reported"), [(KeyboardInterrupt(), KeyboardInterrupt), (OSError("cut"), RuntimeError)]
)
def test_what_ends_a_meeting_reaches_the_caller(
    raised: BaseException, reported: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The meeting is called from C, which lets no exception through."""

    def fails(*given: object) -> None:
        raise raised

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        exchange = Exchange(None, 4096, transport="gloo")
        monkeypatch.setattr(exchange.gloo, "all_gather", fails)
        with pytest.raises(reported):
            all_reduce(torch.ones(3), exchange, impl="cpp")
    finally:
        dist.destroy_process_group()


def test_a_rank_whose_meeting_failed_no_longer_writes_where_the_others_read() -> None:
    """They may be slower than it is, and still read what it brought to the last meeting."""

    def fail_and_go_on() -> bool:
        import torch
        import torch.distributed as dist

        from labkit.kernels.all_reduce import Exchange, all_gather, all_reduce

        exchange = Exchange(None, 4096)
        for value in (1.0, 2.0):
            all_reduce(torch.full((1024,), value), exchange, impl="cpp")
        assert exchange.c.slots is not None
        slots = (ctypes.c_char * (2 * 2 * 4096)).from_address(exchange.c.slots)
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

    assert in_ranks(2)(fail_and_go_on) == [True, True]


def test_a_rank_that_has_ended_or_does_not_come_is_named() -> None:
    def wait() -> str:
        import torch
        import torch.distributed as dist

        from labkit.kernels.all_reduce import Exchange, all_reduce

        said = []
        for ended in (True, False):
            exchange = Exchange(None, 4096, timeout_s=60.0 if ended else 0.5)
            dist.barrier()  # every rank has written down who the others are
            if dist.get_rank() == 0:
                if ended:  # as if rank 1 were this process, which is gone
                    with subprocess.Popen(["true"]) as gone:
                        pass
                    assert exchange.c.arrivals is not None
                    ctypes.c_int32.from_address(exchange.c.arrivals + 64 + 8).value = gone.pid
                with pytest.raises(RuntimeError) as failure:
                    all_reduce(torch.ones(3), exchange, impl="cpp")
                said.append(str(failure.value))
            dist.barrier()
        return "\n".join(said)

    told, _ = in_ranks(2)(wait)
    assert isinstance(told, str)
    assert "rank 0: rank 1 has ended" in told
    assert "rank 0: rank 1 did not come within 0 s" in told
