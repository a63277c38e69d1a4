"""Reads of mapped files. A file that was shortened since would end the process with a signal (SIGBUS)."""

from __future__ import annotations

import ctypes
import errno
import mmap
from functools import cache
from pathlib import Path

from labkit.system.errors import UserError

MADV_POPULATE_READ = 22  # Linux 5.14; an older system cannot tell


def require_mapped(address: int, size: int, path: Path) -> None:
    """Reads `size` bytes of mapped memory into the page tables. UserError if `path`, which they are mapped from, has
    become shorter.
    """
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    failed = _libc().madvise(begin, address + size - begin, MADV_POPULATE_READ)
    if failed and ctypes.get_errno() == errno.EFAULT:
        raise UserError(f"{path} was shortened while it was read; download it again, and leave it alone while it loads")


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc
