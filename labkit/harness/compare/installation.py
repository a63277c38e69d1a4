"""The labkit that computes a side: the installed one, or another version of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from labkit.system.processors import BINDINGS

PROTOCOL = 1  # of requests and answers; raised when one changes its meaning. Workers from before sharing have none
FIXED = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}  # the parent has already resolved the model


@dataclass(frozen=True)
class Installation:
    """A Python interpreter, and the environment in which it imports one version of labkit."""

    python: str = sys.executable
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)  # added to this process's
    without: tuple[str, ...] = ()  # variables of this process that it must not have
    version: str = ""  # in names of sides; empty: the installed labkit
    imported: str = ""  # path of labkit/__init__.py there; empty: unknown
    described: Mapping[str, Any] = field(default_factory=dict, hash=False)  # fields of its `Environment` that differ

    def variables(self, **added: str) -> dict[str, str]:
        """All environment variables of its processes."""
        kept = {name: value for name, value in os.environ.items() if name not in self.without}
        return kept | FIXED | added | dict(self.environment)

    def with_variables(self, added: Mapping[str, str]) -> Installation:
        """The same installation with more environment variables."""
        return replace(self, environment={**self.environment, **added})

    def module(self, name: str, *arguments: str) -> list[str]:
        """The command that runs one of its modules."""
        return [self.python, "-P", "-m", name, *arguments]


INSTALLED = Installation()


def pinned(threads: int) -> dict[str, str]:
    """Variables with which OpenMP binds each thread of a team to a processor of its own. All processes get the same.

    Without them the main thread of one side can stay on a slower processor for many seconds. Empty where there are too
    few processors, and where the user has bound the threads.
    """
    processors = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(processors) < threads or any(name in os.environ for name in BINDINGS):
        return {}
    places = ",".join(f"{{{processor}}}" for processor in processors[:threads])
    return {"OMP_PLACES": places, "OMP_PROC_BIND": "close"}
