"""Memory that the ranks of one machine share, so that they read each other's data without copies."""

import mmap
import os
import socket
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist


class SharedMemory(NamedTuple):
    """The memory, zeros at first, and the process id of each rank that maps it."""

    memory: mmap.mmap
    pids: tuple[int, ...]


def shared_memory(group: dist.ProcessGroup | None, size: int) -> SharedMemory | None:
    """`size` bytes of the group's rank 0 that all its ranks map; None if not all of them can. All ranks call it at the
    same time.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    created = _created(size) if rank == 0 else None
    try:
        gathered: list[Any] = [None] * ranks
        dist.all_gather_object(gathered, (system(), os.getpid(), created), group)
        systems, pids, descriptors = zip(*gathered, strict=True)
        mapped = None
        if len(set(systems)) == 1 and descriptors[0] is not None:
            mapped = _mapped(pids[0], descriptors[0], size)
        reached: list[Any] = [None] * ranks
        dist.all_gather_object(reached, mapped is not None, group)
    finally:
        if created is not None:
            os.close(created)
    if mapped is None or not all(reached):
        return None
    return SharedMemory(mapped, pids)


def _created(size: int) -> int | None:
    """The descriptor of a file in memory; None if the system refuses, so that all ranks use another transport."""
    try:
        descriptor = os.memfd_create("labkit")
    except OSError:
        return None
    try:
        os.ftruncate(descriptor, size)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _mapped(pid: int, descriptor: int, size: int) -> mmap.mmap | None:
    try:
        own = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)
    except OSError:
        return None
    try:
        # Populated at once, so that the first message does not wait for pages.
        return mmap.mmap(own, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    except OSError:
        return None
    finally:
        os.close(own)


def system() -> tuple[str, ...]:
    """An identity that is equal for processes that can map each other's memory."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not boot.exists():
        return (socket.gethostname(), f"pid {os.getpid()}")  # not on Linux: every process differs
    return (socket.gethostname(), boot.read_text(), os.readlink("/proc/self/ns/pid"))
