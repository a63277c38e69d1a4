"""Checks of `labkit doctor` by name."""

from labkit.nsys.doctor.check import DoctorCheck


def by_name(checks: list[DoctorCheck]) -> dict[str, DoctorCheck]:
    named = {check.name: check for check in checks}
    assert len(named) == len(checks)
    return named
