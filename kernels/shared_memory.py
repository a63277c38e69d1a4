"""Memory that the ranks of one machine share, so that what one writes the others can read where it lies."""

import mmap
import os
import socket
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist


class SharedMemory(NamedTuple):
    """The memory, zeros at first, and the process of each rank that maps it."""

    memory: mmap.mmap
    pids: tuple[int, ...]


def shared_memory(group: dist.ProcessGroup | None, size: int) -> SharedMemory | None:
    """`size` bytes of the group's rank 0 that all its ranks map; None where not all of them can. All of them call it at
    the same time.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    made = _made(size) if rank == 0 else None
    try:
        everyone: list[Any] = [None] * ranks
        dist.all_gather_object(everyone, (system(), os.getpid(), made), group)
        systems, pids, descriptors = zip(*everyone, strict=True)
        mapped = None
        if len(set(systems)) == 1 and descriptors[0] is not None:
            mapped = _mapped(pids[0], descriptors[0], size)
        reached: list[Any] = [None] * ranks
        dist.all_gather_object(reached, mapped is not None, group)
    finally:
        if made is not None:
            os.close(made)
    if mapped is None or not all(reached):
        return None
    return SharedMemory(mapped, pids)


def _made(size: int) -> int | None:
    """A file in memory; None where the system gives none, so that the ranks go another way together."""
    try:
        made = os.memfd_create("labkit")
    except OSError:
        return None
    try:
        os.ftruncate(made, size)
    except OSError:
        os.close(made)
        return None
    return made


def _mapped(pid: int, descriptor: int, size: int) -> mmap.mmap | None:
    try:
        own = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)
    except OSError:
        return None
    try:
        return mmap.mmap(own, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)  # no first message waits for pages
    except OSError:
        return None
    finally:
        os.close(own)


def system() -> tuple[str, ...]:
    """What processes that can map each other's memory have in common."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not boot.exists():
        return (socket.gethostname(), f"pid {os.getpid()}")  # no Linux: by themselves
    return (socket.gethostname(), boot.read_text(), os.readlink("/proc/self/ns/pid"))
