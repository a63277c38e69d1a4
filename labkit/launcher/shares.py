"""Shares of a machine's processors, one for each of its ranks.

Ranks that may run anywhere get in each other's way: a rank that waits for another in a collective holds up its own
threads, and caches are cold after every move. So each rank is pinned to its share, as `taskset` does it.

Environment: LABKIT_PIN=0 leaves the ranks where the system puts them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from labkit.system.processors import usable_processors

PIN = "LABKIT_PIN"
TOPOLOGY = Path("/sys/devices/system/cpu")


def allowed() -> tuple[int, ...]:
    """The processors that this process may run on, ordered by socket and core."""
    return tuple(sorted(os.sched_getaffinity(0), key=_place))


def share(rank: int, ranks: int, processors: Sequence[int]) -> tuple[int, ...]:
    """The processors of `rank` among `ranks` on this machine: none if there are more ranks than processors."""
    if len(processors) < ranks:
        return ()
    first, end = (len(processors) * bound // ranks for bound in (rank, rank + 1))
    return tuple(processors[first:end])


def threads_each(ranks: int) -> int:
    """Number of threads for each of `ranks` that fills this machine without crowding it, at least 1."""
    return max(1, usable_processors() // ranks)


def pin_this_rank(environment: Mapping[str, str] = os.environ) -> tuple[int, ...]:
    """Pins this process, its threads and its future children to its rank's share. Returns the share; () if it did
    nothing.

    The rank is torchrun's: LOCAL_RANK of LOCAL_WORLD_SIZE. Nothing is done with LABKIT_PIN=0, with more ranks than
    processors, if OMP_NUM_THREADS exceeds the share, or if this rank is already bound: its mask then differs from its
    parent's.
    """
    if environment.get(PIN) == "0" or not {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= environment.keys():
        return ()
    mine = share(int(environment["LOCAL_RANK"]), int(environment["LOCAL_WORLD_SIZE"]), allowed())
    if not mine or _threads_set(environment) > len(mine) or _bound_already():
        return ()
    for thread in os.listdir("/proc/self/task"):  # an import may have started the threads of OpenMP
        with suppress(ProcessLookupError):  # it has ended since
            os.sched_setaffinity(int(thread), mine)
    return mine


def _threads_set(environment: Mapping[str, str]) -> int:
    count = environment.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(count) if count.isdecimal() else 1


def _bound_already() -> bool:
    return os.sched_getaffinity(os.getppid()) != os.sched_getaffinity(0)


def _place(processor: int) -> tuple[int, int, int]:
    folder = TOPOLOGY / f"cpu{processor}" / "topology"
    try:
        package, core = (int((folder / name).read_text()) for name in ("physical_package_id", "core_id"))
    except OSError:  # not every system has these files
        package, core = 0, processor
    return package, core, processor
