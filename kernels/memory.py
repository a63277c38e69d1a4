"""Memory for weights: of a device, or reserved address space with huge pages where the system has them."""

import ctypes
import mmap
from typing import Protocol, Self

import torch
from torch import Tensor

from labkit.system.errors import UserError
from labkit.system.rounding import round_up

from .build import same_in_cpp

HUGE_PAGE = 2 << 20
ALIGNMENT = 64  # bytes: a cache line, and a vector of AVX-512
same_in_cpp({"kLine": ALIGNMENT})


def return_freed_memory() -> None:
    """Gives the heap's free pages back to the system, where the C library can (glibc).

    By itself the heap keeps freed blocks if one small block after them is still in use.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def reserved(capacity: int) -> Tensor:
    """uint8 [capacity] of address space, beginning at a multiple of HUGE_PAGE. It takes memory only as it is filled."""
    mapped = mmap.mmap(-1, capacity + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapped, dtype=torch.uint8)
    return memory[-memory.data_ptr() % HUGE_PAGE :][:capacity]


class Place(Protocol):
    """Memory for weights."""

    device: torch.device

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor."""


class Heap:
    """Memory of a device, a piece for each tensor."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)


class Arena:
    """Hands out consecutive tensors from one piece of memory, which is freed with the last of them.

    The same calls give the same places in every arena, so that weights of one shape can take turns in one memory.
    """

    def __init__(self, memory: Tensor) -> None:
        """memory: uint8 [bytes], at an address that is a multiple of 64."""
        if memory.dtype != torch.uint8 or memory.dim() != 1 or memory.data_ptr() % ALIGNMENT:
            raise UserError(
                f"memory: expected uint8 [bytes] at a multiple of {ALIGNMENT}, got {memory.dtype} {list(memory.shape)} "
                f"at {memory.data_ptr():#x}"
            )
        self.device, self._memory, self._next = memory.device, memory, 0

    @classmethod
    def reserved(cls, capacity: int) -> Self:
        """An arena of `capacity` bytes of address space. It takes memory only as the tensors are filled."""
        return cls(reserved(capacity))

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor, aligned to 64 bytes. Raises MemoryError past the capacity."""
        size = torch.Size(shape).numel() * dtype.itemsize
        begin, end = self._next, self._next + size
        if end > len(self._memory):
            raise MemoryError(f"an arena of {len(self._memory)} bytes is full; {list(shape)} x {dtype} don't fit")
        self._next = begin + aligned(size)
        return self._memory[begin:end].view(dtype).view(shape)


def aligned(size: int) -> int:
    """Bytes that an arena takes for a tensor of `size` bytes."""
    return round_up(size, ALIGNMENT)
