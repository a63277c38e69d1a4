"""Interface of loaders: how a row of the table of sides becomes a side that generates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch

from labkit.harness.compare.loaded_side import LoadedSide
from labkit.harness.compare.sides import SideRow, side_row
from labkit.system.errors import UserError
from labkit.weights.source import ModelSource

NO_GPU_VISIBLE = "hide the GPU with CUDA_VISIBLE_DEVICES=-1"


@dataclass(frozen=True)
class Room:
    """Sizes for which a side is loaded."""

    threads: int
    batch: int  # sequences
    prompt: int  # tokens of each sequence's prompt
    positions: int  # the most tokens of a sequence
    memory_gb: float | None = None  # limit in 1e9 bytes; None: no limit


class Loader:
    """Checks the sides whose rows name this class. Its subclasses MemoryLoader and FolderLoader also load them."""

    def check_name(self, side: str) -> None:
        """UserError where the side's name contains an unknown part, such as a precision."""

    def check(self, side: str, *, dtype: str, batch: int) -> None:
        """UserError where the side cannot run on this machine, or not with this dtype and batch."""

    def check_model(self, side: str, source: ModelSource) -> None:
        """UserError where this side cannot run the model."""

    def get_ready(self, side: str, dtype: torch.dtype) -> None:
        """Imports and compiles all that the side needs besides its weights. Its memory is counted from then on."""


class MemoryLoader(Loader, ABC):
    """Sides that are made of the vanilla weights in this process."""

    @abstractmethod
    def load(self, side: str, source: ModelSource, dtype: torch.dtype, options: Mapping[str, Any]) -> LoadedSide:
        """The side, loaded. `options` are options of `init_inference`, for the engine's sides."""


class FolderLoader(Loader, ABC):
    """Sides that read a folder, mostly with files that are written for them."""

    converts: ClassVar[bool] = True  # its sides read a model that `convert` wrote, instead of the vanilla one

    @abstractmethod
    def convert(self, side: str, source: ModelSource, dtype: str, folder: Path) -> None:
        """Writes the model into `folder` as this side reads it, in its own process. Called only if `converts`."""

    @abstractmethod
    def load(self, side: str, folder: Path, source: ModelSource, dtype: torch.dtype, room: Room) -> LoadedSide:
        """The side, loaded from the model that `convert` wrote into `folder`. `dtype` is the dtype of the other sides.

        OutOfBudgetError where the side knows beforehand that its memory is not enough.
        """


def loader_of(side: str) -> Loader:
    """The loader of the side of this name. UserError for an unknown side."""
    return loader_at(side_row(side).loader)


@cache
def loader_at(place: str) -> Loader:
    """The loader at `place`, a module of this package and a class."""
    module, _, name = place.partition(":")
    loader: Loader = getattr(import_module(f"{__package__}.{module}"), name)()
    return loader


def check_side(name: str, *, dtype: str, batch: int) -> None:
    """UserError for an unknown side, and for one that cannot run on this machine or with this dtype and batch."""
    row, loader = side_row(name), loader_of(name)
    loader.check_name(name)
    _check_device(name, row)
    if row.package and find_spec(row.package) is None:
        raise UserError(f"the side {name!r} needs a package that is not installed; {row.needs}")
    loader.check(name, dtype=dtype, batch=batch)


def load_side(name: str, source: ModelSource, dtype: torch.dtype, threads: int, **options: Any) -> LoadedSide:
    """Loads `source` as the side `name`, to run on `threads` threads of this process or on its GPU.

    `options` are options of `init_inference`, for the engine's sides.

    UserError as from `check_side`, for a side that reads files of its own, and for a model that the side cannot run.
    """
    loader = loader_of(name)
    if not isinstance(loader, MemoryLoader):
        raise UserError(f"got the side {name!r}, which needs files of its own; expected a side such as hf-eager, fused")
    check_side(name, dtype=str(dtype).removeprefix("torch."), batch=1)
    loader.check_model(name, source)
    torch.set_num_threads(threads)
    return loader.load(name, source, dtype, options)


def _check_device(name: str, row: SideRow) -> None:
    on_gpu = torch.cuda.is_available()
    instead = f"use {row.instead}" if row.instead else ""
    if row.device == "GPU" and not on_gpu:
        raise UserError(f"the side {name!r} got no GPU, expected an NVIDIA GPU and PyTorch's CUDA build; {instead}")
    if row.device == "CPU" and on_gpu:
        advice = " or ".join(filter(None, (instead, NO_GPU_VISIBLE)))
        raise UserError(f"{name} is a side on CPUs only, and there is a GPU; {advice}")
