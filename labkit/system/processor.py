"""Facts about this machine's processor, from Linux."""

from __future__ import annotations

import platform
import re
from functools import cache
from pathlib import Path


@cache
def cpu_field(name: str) -> str:
    """The value of a field of the first CPU in /proc/cpuinfo; empty if there is no such field or file."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.split(":")[0].strip() == name), "")


def cpu_flags() -> frozenset[str]:
    """The instruction sets that Linux reports for this CPU."""
    return frozenset((cpu_field("flags") or cpu_field("Features")).split())  # the field's name on x86, on ARM


def cpu_name() -> str:
    """The name of this machine's processor. A name without a number gets its family and model, since virtual machines
    call processors of different generations "AMD EPYC".
    """
    name = cpu_field("model name") or platform.processor() or platform.machine()
    family, model = cpu_field("cpu family"), cpu_field("model")
    return name if re.search(r"\d", name) or not family else f"{name} family {family} model {model}"
