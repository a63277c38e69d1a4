"""Read rate of a disk: the floor of a step that reads its weights from a file."""

from __future__ import annotations

import errno
import os
from itertools import cycle
from pathlib import Path
from random import randrange
from tempfile import NamedTemporaryFile
from time import perf_counter

from labkit.kernels.memory import reserved
from labkit.system.errors import UserError
from labkit.system.page_cache import make_cold

BLOCK = 4 << 20  # bytes of a read
RING = 16  # blocks of memory that take turns as buffers: together larger than most caches
BLOCKS = 16  # in the file that is written for the probe
PAGE = 4096


def read_rate_gb_s(file: Path, seconds: float = 0.5) -> float:
    """GB/s (1e9 bytes) at which one thread reads a file past the page cache, for `seconds` or slightly longer. Reads
    blocks of 4 MiB in sequence from a random block on. If the file system refuses direct reads, the page cache is
    emptied first and then used.

    Layers are read in the same way. More threads and other block sizes are no faster. Huge pages double the rate,
    because the kernel hands fewer pieces to the disk. A single buffer would stay in the processor's caches and be a
    third faster than the memory that layers need (measured on a virtual disk of 3 GB/s and a cache of 32 MB).

    The rate of a shared disk changes within seconds, so probe right before or after the run that it judges. Raises
    UserError for a file of less than one page.
    """
    file_bytes = file.stat().st_size
    block = min(BLOCK, file_bytes // PAGE * PAGE)
    if not block:
        raise UserError(f"got {file} of {file_bytes} bytes; expected at least {PAGE}, the smallest read")
    size = file_bytes // block * block
    descriptor = _opened(file)
    try:
        blocks = [part.numpy().data for part in reserved(RING * block).fill_(0).split(block)]
        start, read, begun = randrange(size // block) * block, 0, perf_counter()
        for buffer in cycle(blocks):
            read += os.preadv(descriptor, [buffer], (start + read) % size)
            if (took := perf_counter() - begun) >= seconds:
                break
        return read / took / 1e9
    finally:
        os.close(descriptor)


def folder_rate_gb_s(folder: Path, seconds: float = 0.5) -> float:
    """Read rate of the disk that holds a folder, from a file of 64 MiB that is written there and removed."""
    with NamedTemporaryFile(dir=folder, prefix=".labkit-") as file:
        for _ in range(BLOCKS):
            file.write(os.urandom(BLOCK))  # random, so that no file system can skip or compress it
        file.flush()
        os.fsync(file.fileno())
        return read_rate_gb_s(Path(file.name), seconds)


def _opened(file: Path) -> int:
    try:
        return os.open(file, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        make_cold(file)
        return os.open(file, os.O_RDONLY)
