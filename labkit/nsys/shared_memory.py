"""What nsys leaves in shared memory when it is killed, and what to do about it.

All nsys processes of one version share a segment, NSys-VERSION. One that was killed while it wrote leaves the segment
as it was; every capture on the machine then fails with "Agent launcher failed.", or hangs. Seen with 2022.4.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import psutil

SHARED = Path("/dev/shm")
POLL_S = 0.1
SEGMENTS = ("NSys-*", "quadd-*", "sem.nsys_sem_*")


def sweep_shared_memory(folder: Path = SHARED, *, patience_s: float = 0.0) -> None:
    """Remove this user's segments of nsys, unless an nsys runs that may use them, still after `patience_s`."""
    until = time.monotonic() + patience_s
    while any(_is_nsys(process) for process in psutil.process_iter(["name", "status"])):
        if time.monotonic() >= until:
            return
        time.sleep(POLL_S)
    for segment in (segment for pattern in SEGMENTS for segment in folder.glob(pattern)):
        with suppress(OSError):  # another capture that begins just now removes them too
            if segment.stat().st_uid == os.getuid():
                segment.unlink()


def _is_nsys(process: psutil.Process) -> bool:
    name, status = process.info["name"], process.info["status"]
    return (name or "").startswith("nsys") and status != psutil.STATUS_ZOMBIE
