"""The doctor's line on the resolution of this machine: the smallest differences that it tells apart, as kept."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.nsys.doctor.check import DoctorCheck, Status
from labkit.statistics.kept_resolutions import KeptResolution, kept_resolutions

NAME = "resolution"
UNKNOWN = "not measured yet; labkit doctor --resolution does it in about a minute"


def resolution() -> DoctorCheck:
    """The kept resolutions of this machine, or how to measure one."""
    return resolution_check(kept_resolutions())


def resolution_check(kept: Sequence[KeptResolution]) -> DoctorCheck:
    """The check for these resolutions."""
    finding = "; ".join(f"this machine tells {resolution}" for resolution in kept)
    figures = tuple(resolution.as_dict() for resolution in kept)
    return DoctorCheck(NAME, Status.OK, finding or UNKNOWN, figures=figures)
