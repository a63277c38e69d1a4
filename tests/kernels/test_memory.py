"""Memory for weights, and the probe of its read bandwidth."""

import gc
import re
from pathlib import Path

import pytest
import torch

from labkit.kernels.memory import HUGE_PAGE, Arena
from labkit.kernels.probe import read_bandwidth_gb_s


def test_tensors_are_aligned_and_do_not_overlap() -> None:
    arena = Arena.reserved(4096)
    shapes = [((3, 5), torch.float32), ((7,), torch.bfloat16), ((2, 2, 2), torch.float16), ((1,), torch.uint8)]
    tensors = [arena.empty(shape, dtype) for shape, dtype in shapes]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors)
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(tensors))


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this system has no huge pages")
def test_the_system_is_asked_for_huge_pages_in_memory_that_may_have_them() -> None:
    tensor = Arena.reserved(4 * HUGE_PAGE).empty((2 * HUGE_PAGE,), torch.uint8)
    address = tensor.data_ptr()
    for mapping in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        low, high = (int(end, 16) for end in mapping.split(" ", 1)[0].split("-"))
        if low <= address < high:
            flags = mapping.split("VmFlags:")[1].split()
            assert "hg" in flags
            assert "sh" not in flags, "shared memory gets huge pages only where an administrator says so"
            return
    pytest.fail(f"no mapping holds {address:#x}")


def test_a_full_arena_says_so() -> None:
    arena = Arena.reserved(256)
    arena.empty((64,), torch.float32)
    with pytest.raises(MemoryError, match="an arena of 256 bytes is full"):
        arena.empty((HUGE_PAGE,), torch.float32)


def test_tensors_outlive_their_arena() -> None:
    arena = Arena.reserved(1 << 20)
    tensor = arena.empty((1 << 18,), torch.float32).fill_(3.0)
    del arena
    gc.collect()
    assert tensor.sum() == 3.0 * (1 << 18)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_probed_bandwidth_is_one_that_a_machine_can_have(threads: int) -> None:
    assert 0.2 < read_bandwidth_gb_s(threads, seconds=0.01) < 5000
