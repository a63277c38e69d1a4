"""Memory for weights: one reservation of address space, in huge pages where the system gives them."""

import ctypes
import mmap

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20


def return_freed_memory() -> None:
    """Gives the heap's free pages back to the system, where the C library can (glibc).

    It would keep freed blocks, and one small block that lives behind them pins them all.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class Arena:
    """Hands out tensors one behind the other; memory is used as they are filled, and freed with the last of them."""

    def __init__(self, capacity: int) -> None:
        self._memory = mmap.mmap(-1, capacity + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        start = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        self._next = -start % HUGE_PAGE
        self._end = capacity + HUGE_PAGE

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor, aligned to 64 bytes. Raises MemoryError past the capacity."""
        count = torch.Size(shape).numel()
        begin = self._next
        self._next = begin + -(-count * dtype.itemsize // 64) * 64
        if self._next > self._end:
            raise MemoryError(f"an arena of {self._end - HUGE_PAGE} bytes is full; {count} x {dtype} don't fit")
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=begin).view(shape)
