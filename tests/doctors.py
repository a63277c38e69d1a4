"""Checks of the doctor by name."""

from labkit.nsys.doctor.check import DoctorCheck


def by_name(checks: list[DoctorCheck]) -> dict[str, DoctorCheck]:
    found = {check.name: check for check in checks}
    assert len(found) == len(checks)
    return found
