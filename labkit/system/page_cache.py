"""The part of a file that is in the page cache, and how to drop it."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

CACHESTAT = 451  # the system call, of Linux 6.5


class CRange(ctypes.Structure):
    _fields_ = [("offset", ctypes.c_uint64), ("length", ctypes.c_uint64)]


class CCacheStat(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")]


def cached_bytes(file: Path) -> int | None:
    """Bytes of a file that are in the page cache; None if the system does not tell."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        counts = CCacheStat()
        whole, system = CRange(0, 0), ctypes.CDLL(None, use_errno=True)
        refused = system.syscall(CACHESTAT, descriptor, ctypes.byref(whole), ctypes.byref(counts), 0)
        return None if refused else int(counts.cached) * mmap.PAGESIZE
    finally:
        os.close(descriptor)


def make_cold(file: Path) -> int | None:
    """Drops the pages of a file that no process maps from the page cache. Returns `cached_bytes` afterwards."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # unwritten pages would stay
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    return cached_bytes(file)
