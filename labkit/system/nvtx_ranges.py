"""Push and pop ranges of one NVTX domain, so that they arrive whatever the versions of nvtx and of the tool are.

From 0.2.12 on nvtx asks the tool whether a domain is enabled and else hands out a dummy that drops every range. Nsight
Systems 2022 and 2023 answer no and would record them all the same, so the real domain is made without asking.
"""

from __future__ import annotations

import os
import warnings
from functools import cache
from importlib.metadata import version
from typing import Any

import nvtx
from nvtx._lib import Domain
from nvtx._lib.lib import DomainHandle, mark, pop_range, push_range

DOMAIN = "labkit"
RANK_MARK = "rank."  # begins the mark with which a process of torchrun says which one it is


def push(text: str) -> None:
    """Open a range on this thread."""
    push_range(_attributes(text), _domain().handle)


def pop() -> None:
    """Close the range that was opened last on this thread."""
    pop_range(_domain().handle)


@cache
def _domain() -> Any:
    domain = nvtx.get_domain(DOMAIN)
    if not isinstance(domain, Domain):
        warnings.warn(
            f"nvtx {version('nvtx')} would drop every range under this tool; labkit's own ranges go around that, those "
            "of other code are lost: pip install nvtx==0.2.11",
            RuntimeWarning,
            stacklevel=2,
        )
        domain = object.__new__(Domain)
        domain.handle = DomainHandle(DOMAIN)
        domain.__init__(DOMAIN)
    if (rank := os.environ.get("RANK")) is not None:
        mark(
            domain.get_event_attributes(f"{RANK_MARK}{rank}", None, None, None), domain.handle
        )  # whose process this is
    return domain


@cache
def _attributes(text: str) -> Any:
    """A registered string, so that a range costs half a microsecond and a report holds each text once."""
    return _domain().get_event_attributes(text, None, None, None)
