"""The number of processors that this process may use at a time, from its affinity mask and its CPU quota."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil

from labkit.system.cgroups import own_groups

BINDINGS = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")


def usable_processors() -> int:
    """Number of processors that this process may use, at least 1. A quota is rounded up to whole processors."""
    quota = _quota_here()
    allowed = os.cpu_count() or 1 if _mask_misleads() else len(os.sched_getaffinity(0))
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def physical_cores() -> int:
    """Number of cores of this machine, or of processors where the system does not tell them apart."""
    return psutil.cpu_count(logical=False) or os.cpu_count() or 1


def cpu_quota(groups: Iterable[tuple[Path, int]]) -> float | None:
    """The smallest CPU quota of the control groups, in processors; None: no group has a quota.

    groups: the folder and the version of cgroups of each.
    """
    quotas = [quota for folder, version in groups if (quota := _quota_of(folder, version)) is not None]
    return min(quotas, default=None)


def _quota_of(folder: Path, version: int) -> float | None:
    names = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    with suppress(OSError, ValueError):
        quota, period = " ".join((folder / name).read_text() for name in names).split()
        if quota != "max" and float(quota) > 0:
            return float(quota) / float(period)
    return None


def _quota_here() -> float | None:
    """The quota at this moment: it can change while a program runs, but the groups of a process hardly do."""
    return cpu_quota(_groups_here())


@cache
def _groups_here() -> tuple[tuple[Path, int], ...]:
    return tuple(own_groups("cpu"))


@cache
def _mask_misleads() -> bool:
    """Whether the affinity mask of this thread says nothing about the other threads: OpenMP, which reads its variables
    once, can bind the main thread to one processor.
    """
    return any(name in os.environ for name in BINDINGS) or not hasattr(os, "sched_getaffinity")
