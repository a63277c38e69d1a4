"""What every peer has: where it comes from, the sides that it gives, and how it converts and loads a model."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import torch

from labkit.harness.compare.baselines import comparison_device
from labkit.harness.compare.peers.folder import installed, packages_in
from labkit.harness.compare.peers.pip import Pip
from labkit.harness.compare.provider import Provider
from labkit.models.dtypes import FLOAT_DTYPES
from labkit.system.errors import UserError


class Peer(Provider):
    """Another runtime. It computes in a worker like every other side's, with the same weights, prompts, clock and
    threads, and otherwise with the settings that it chooses itself.

    name: as on the command line. package: what Python imports it as. requirements: its packages, pinned, without those
    that labkit itself depends on. sides: whether each of its sides has weights of a type of its own, whatever the other
    sides have. dtypes: those that its other side computes in. most_sequences: at once; None: any number.
    """

    name: ClassVar[str]
    package: ClassVar[str]
    requirements: ClassVar[tuple[str, ...]]
    sides: ClassVar[Mapping[str, bool]]
    dtypes: ClassVar[tuple[str, ...]] = tuple(FLOAT_DTYPES)
    most_sequences: ClassVar[int | None] = None

    def packages(self) -> Path | None:
        """The folder to import the package from; None where it is not installed."""
        found = installed(self.name)
        return None if found is None else found.packages

    def unavailable(self) -> str | None:
        """Why it cannot be a side here, and what to do; None when it can."""
        if comparison_device().type != "cpu":
            return f"{self.name} is a side on CPUs only; hide the GPU with CUDA_VISIBLE_DEVICES=-1"
        found = installed(self.name)
        if found is None:
            return f"{self.name} is not installed; install it with: labkit peers install {self.name}"
        if found.fault:
            return f"{self.name}: {found.fault}; install it anew with: labkit peers install {self.name} --again"
        return None

    def check(self, side: str, *, dtype: str, batch: int) -> None:
        if reason := self.unavailable():
            raise UserError(reason)
        if self.most_sequences is not None and batch > self.most_sequences:
            raise UserError(
                f"got a batch of {batch}, expected {self.most_sequences}: {self.name} runs no more at once here"
            )
        if not self.sides[side] and dtype not in self.dtypes:
            raise UserError(f"got {dtype} for {side}, expected {' or '.join(self.dtypes)}")

    def get_ready(self, side: str, dtype: torch.dtype) -> None:
        self.import_package()

    def import_package(self) -> Any:
        """The package itself. Whatever is installed beside labkit comes before what is installed for the peer."""
        packages = self.packages()
        assert packages is not None
        if str(packages) not in sys.path:
            sys.path.append(str(packages))
        return import_module(self.package)

    def install(self, pip: Pip, folder: Path) -> None:
        """Put what it needs into `folder`: its packages into `packages_in(folder)`."""
        pip.install(self.requirements, packages_in(folder))
