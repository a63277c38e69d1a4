"""Push and pop ranges of one NVTX domain, which work with every version of nvtx and of the profiling tool.

nvtx 0.2.12 and later ask the tool whether a domain is enabled, and return a dummy that drops every range if it is not.
Nsight Systems 2022 and 2023 answer no although they would record the ranges. So labkit makes the real domain without
asking.
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
RANK_MARK = "rank."  # prefix of the mark with which a torchrun process records its rank


def push(text: str) -> None:
    """Opens a range on this thread."""
    push_range(_attributes(text), _domain().handle)


def pop() -> None:
    """Closes the range that was opened last on this thread."""
    pop_range(_domain().handle)


@cache
def _domain() -> Any:
    domain = nvtx.get_domain(DOMAIN)
    if not isinstance(domain, Domain):
        warnings.warn(
            f"nvtx {version('nvtx')} drops every range under this tool; labkit's own ranges avoid that, the ranges of "
            "other code are lost: pip install nvtx==0.2.11",
            RuntimeWarning,
            stacklevel=2,
        )
        domain = object.__new__(Domain)
        domain.handle = DomainHandle(DOMAIN)
        domain.__init__(DOMAIN)
    if (rank := os.environ.get("RANK")) is not None:
        mark(domain.get_event_attributes(f"{RANK_MARK}{rank}", None, None, None), domain.handle)
    return domain


@cache
def _attributes(text: str) -> Any:
    """Attributes with a registered string: a range costs half a microsecond, and a report holds each text once."""
    return _domain().get_event_attributes(text, None, None, None)
