"""How fast a disk gives what is not in memory: the floor of a step that reads its weights from a file."""

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
RING = 16  # blocks of memory that are read into in turn: more than most caches hold
BLOCKS = 16  # of a file that is written for the probe
PAGE = 4096


def read_rate_gb_s(file: Path, seconds: float = 0.5) -> float:
    """GB/s (1e9 bytes) at which one thread reads a file past the page cache, in blocks of 4 MiB one after the other
    from a random one on, for so many seconds or a bit longer. Where the file system refuses that, through the page
    cache, which is emptied first.

    It reads as layers are read. More threads and other sizes are no faster. Memory in huge pages takes twice as much in
    a second as memory in small ones, because the kernel has fewer pieces to hand to the disk. One block that is read
    into again and again would stay in the processor's caches, and take a third more than the memory that layers need
    (measured on a virtual disk of 3 GB/s and a cache of 32 MB).

    The rate of a shared disk moves within seconds: call this right beside what is to be judged by it. Raises UserError
    for a file of less than one page.
    """
    held = file.stat().st_size
    block = min(BLOCK, held // PAGE * PAGE)
    if not block:
        raise UserError(f"got {file} of {held} bytes; expected at least {PAGE}, which are read at once")
    size = held // block * block
    descriptor = _opened(file)
    try:
        blocks = [part.numpy().data for part in reserved(RING * block).fill_(0).split(block)]
        first, done, begun = randrange(size // block) * block, 0, perf_counter()
        for buffer in cycle(blocks):
            done += os.preadv(descriptor, [buffer], (first + done) % size)
            if (took := perf_counter() - begun) >= seconds:
                break
        return done / took / 1e9
    finally:
        os.close(descriptor)


def folder_rate_gb_s(folder: Path, seconds: float = 0.5) -> float:
    """The rate of the disk that a folder is on: as above, of a file of 64 MiB that is written there and removed."""
    with NamedTemporaryFile(dir=folder, prefix=".labkit-") as file:
        for _ in range(BLOCKS):
            file.write(os.urandom(BLOCK))  # nothing that the file system could leave out or make smaller
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
