"""Interface of peers: their packages and sides, and how they convert and load a model."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import torch

from labkit.harness.compare.loaded_side import comparison_device
from labkit.harness.compare.loader import NO_GPU_VISIBLE, FolderLoader
from labkit.harness.compare.peers.folder import installed, packages_in
from labkit.harness.compare.peers.pip import Pip
from labkit.harness.compare.sides import SIDES, side_row
from labkit.models.dtypes import FLOAT_DTYPES
from labkit.system.errors import UserError


class Peer(FolderLoader):
    """Another runtime. Its worker has the same weights, prompts, clock and threads as that of every other side. All
    other settings are the runtime's own choice.
    """

    name: ClassVar[str]  # on the command line
    package: ClassVar[str]  # as Python imports it
    requirements: ClassVar[tuple[str, ...]]  # pinned packages, without labkit's own dependencies
    dtypes: ClassVar[tuple[str, ...]] = tuple(FLOAT_DTYPES)  # of the side without a type of its own
    most_sequences: ClassVar[int | None] = None  # the largest batch; None: any

    @property
    def sides(self) -> tuple[str, ...]:
        """Names of the sides of this peer."""
        return tuple(row.name for row in SIDES.values() if row.peer == self.name)

    def packages(self) -> Path | None:
        """The folder from which the package is imported; None where it is not installed."""
        folder = installed(self.name)
        return None if folder is None else folder.packages

    def unavailable(self) -> str | None:
        """Why the peer cannot be a side on this machine, and what to do; None when it can."""
        if comparison_device().type != "cpu":
            return f"{self.name} is a side on CPUs only; {NO_GPU_VISIBLE}"
        folder = installed(self.name)
        if folder is None:
            return f"{self.name} is not installed; install it with: labkit peers install {self.name}"
        if folder.fault:
            return f"{self.name}: {folder.fault}; install it anew with: labkit peers install {self.name} --again"
        return None

    def check(self, side: str, *, dtype: str, batch: int) -> None:
        if reason := self.unavailable():
            raise UserError(reason)
        if self.most_sequences is not None and batch > self.most_sequences:
            raise UserError(
                f"got a batch of {batch}, expected {self.most_sequences}: {self.name} runs no more sequences at once"
            )
        if not side_row(side).own_type and dtype not in self.dtypes:
            raise UserError(f"got {dtype} for {side}, expected {' or '.join(self.dtypes)}")

    def get_ready(self, side: str, dtype: torch.dtype) -> None:
        self.import_package()

    def import_package(self) -> Any:
        """The package itself. Packages of labkit's environment precede the peer's own packages."""
        packages = self.packages()
        assert packages is not None
        if str(packages) not in sys.path:
            sys.path.append(str(packages))
        return import_module(self.package)

    def install(self, pip: Pip, folder: Path) -> None:
        """Installs the peer into `folder`, with its packages in `packages_in(folder)`."""
        pip.install(self.requirements, packages_in(folder))
