"""`labkit doctor`: problems on this machine that would spoil a measurement or a capture, and their repairs."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.table import Column, Table
from rich.text import Text

from labkit.nsys.doctor import machine_checks as machine
from labkit.nsys.doctor import profiler_checks as profiler
from labkit.nsys.doctor.check import DoctorCheck, Status
from labkit.nsys.tool import LOCATION, Nsys, find_nsys

STYLES = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red"}
FAILURES = (OSError, ValueError, ImportError, sqlite3.Error)


def examine(*, sampling: bool = False, probe: bool = True) -> list[DoctorCheck]:
    """All checks, in the order of the table; about five seconds. A check that itself fails gives WARN with the reason.

    `sampling`: also check whether nsys may sample the CPU. `probe`: capture a program with two ranges, and check that
    the ranges arrive.
    """
    try:
        nsys = find_nsys()
    except ValueError as error:
        wrong_name = DoctorCheck("nsys", Status.FAIL, str(error), f"unset {LOCATION}")
        return [wrong_name, *_profiler_checks(None, sampling, probe)[1:], *_machine_checks(None)]
    return [*_profiler_checks(nsys, sampling, probe), *_machine_checks(nsys)]


def _profiler_checks(nsys: Nsys | None, sampling: bool, probe: bool) -> list[DoctorCheck]:
    temporary_folder = _guarded("temporary folder", profiler.temporary_folder)
    checks = [profiler.nsys_found(nsys), temporary_folder]
    if nsys is not None:
        checks.append(_guarded("importer", partial(profiler.importer, nsys)))
        if probe and all(check.status != Status.FAIL for check in checks):
            checks += _probe_checks(nsys)
    if sampling:
        checks.append(_guarded("CPU sampling", partial(profiler.sampling, nsys)))
    return [*checks, _guarded("worker processes", profiler.worker_start)]


def _probe_checks(nsys: Nsys) -> list[DoctorCheck]:
    try:
        probe = profiler.capture_probe(nsys)
    except FAILURES as error:
        return [_failed("test capture", error)]
    if probe.failure is not None:
        return [profiler.capture(probe)]
    return [profiler.capture(probe), profiler.plain_ranges(probe), profiler.stage_ranges(probe)]


def _machine_checks(nsys: Nsys | None) -> list[DoctorCheck]:
    inventory = machine.take_inventory()
    checks: tuple[tuple[str, Callable[[], DoctorCheck]], ...] = (
        ("Python", machine.python),
        ("PyTorch", partial(machine.torch, inventory)),
        ("Triton", partial(machine.triton, inventory)),
        ("GPU", partial(machine.gpu, inventory)),
        ("driver and CUDA", partial(machine.driver, inventory, nsys)),
        ("CPU kernels", partial(machine.compiler, inventory)),
        ("memory", partial(machine.memory, inventory)),
        ("resolution", machine.resolution),
        ("OpenMP", partial(machine.openmp, inventory)),
        ("threads", partial(machine.threads, inventory)),
        ("CPU frequency", machine.governor),
        ("huge pages", machine.huge_pages),
    )
    return [_guarded(name, check) for name, check in checks]


def _guarded(name: str, check: Callable[[], DoctorCheck]) -> DoctorCheck:
    try:
        return check()
    except FAILURES as error:
        return _failed(name, error)


def _failed(name: str, error: BaseException) -> DoctorCheck:
    return DoctorCheck(name, Status.WARN, f"could not be checked: {error}")


def worst(checks: Iterable[DoctorCheck]) -> Status:
    """FAIL if any check failed, else WARN if any warned, else OK."""
    return max((check.status for check in checks), key=list(Status).index, default=Status.OK)


def as_dict(checks: Iterable[DoctorCheck]) -> dict[str, Any]:
    """The worst status and all checks, for JSON."""
    listed = list(checks)
    return {"status": worst(listed), "checks": [asdict(check) | {"figures": list(check.figures)} for check in listed]}


def doctor_table(checks: Iterable[DoctorCheck], *, repairs: bool = True) -> Table:
    """One row per check, with the repair under its finding unless the caller shows the repairs itself."""
    table = Table(Column("status", no_wrap=True), Column("check", no_wrap=True), Column("finding", overflow="fold"))
    for check in checks:
        finding = Text(check.finding)
        if repairs and check.repair:
            finding.append("\nrepair:", "bold").append(f" {check.repair}", "not bold")
        table.add_row(Text(check.status, STYLES[check.status]), check.name, finding)
    return table
