"""Which processors each of the ranks on one machine computes on.

Ranks that may run anywhere get in each other's way: a rank that waits for another in a collective holds up its own
threads, and caches are cold after every move. So each rank keeps to its share, as `taskset` would have it.

Environment: LABKIT_PIN=0 leaves the ranks where the system puts them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

PIN = "LABKIT_PIN"
TOPOLOGY = Path("/sys/devices/system/cpu")


def allowed() -> tuple[int, ...]:
    """The processors that this process may run on: those of one socket, and those of one core, side by side."""
    return tuple(sorted(os.sched_getaffinity(0), key=_place))


def share(rank: int, ranks: int, processors: Sequence[int]) -> tuple[int, ...]:
    """What `rank`, of `ranks` on this machine, gets of them: none where there are more ranks than processors."""
    if len(processors) < ranks:
        return ()
    first, end = (len(processors) * each // ranks for each in (rank, rank + 1))
    return tuple(processors[first:end])


def threads_each(ranks: int) -> int:
    """Threads for each of `ranks` on this machine that do not crowd it, at least 1."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def pin_this_rank(environment: Mapping[str, str] = os.environ) -> tuple[int, ...]:
    """Keep this process, its threads and what it starts on its rank's share; returns the share, () if nothing was done.

    The rank is torchrun's: LOCAL_RANK of LOCAL_WORLD_SIZE. Nothing is done with LABKIT_PIN=0, with more ranks than
    processors, where OMP_NUM_THREADS asks for more than the share, and where somebody has bound this rank already, so
    that it may not run where its parent may.
    """
    if environment.get(PIN) == "0" or not {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= environment.keys():
        return ()
    mine = share(int(environment["LOCAL_RANK"]), int(environment["LOCAL_WORLD_SIZE"]), allowed())
    if not mine or _asked_threads(environment) > len(mine) or _bound_already():
        return ()
    for thread in os.listdir("/proc/self/task"):  # those of OpenMP may have been started by an import
        with suppress(ProcessLookupError):  # it has ended since
            os.sched_setaffinity(int(thread), mine)
    return mine


def _asked_threads(environment: Mapping[str, str]) -> int:
    asked = environment.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(asked) if asked.isdecimal() else 1


def _bound_already() -> bool:
    return os.sched_getaffinity(os.getppid()) != os.sched_getaffinity(0)


def _place(processor: int) -> tuple[int, int, int]:
    folder = TOPOLOGY / f"cpu{processor}" / "topology"
    try:
        package, core = (int((folder / name).read_text()) for name in ("physical_package_id", "core_id"))
    except OSError:  # not every system tells
        package, core = 0, processor
    return package, core, processor
