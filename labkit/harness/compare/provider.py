"""Interface of providers. A provider loads its sides in a way of its own, mostly from files written for them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from labkit.harness.compare.baselines import Baseline
from labkit.weights.source import ModelSource


@dataclass(frozen=True)
class Room:
    """Sizes for which a side is loaded."""

    threads: int
    batch: int  # sequences
    prompt: int  # tokens of each sequence's prompt
    positions: int  # the most tokens of a sequence
    memory_gb: float | None = None  # limit in 1e9 bytes; None: no limit


class Provider(ABC):
    """Loads the sides of one kind."""

    converts: ClassVar[bool] = True  # its sides read a model that `convert` wrote, instead of the vanilla one
    staged: ClassVar[bool] = False  # its sides run on several ranks, each with some of the layers

    def check_name(self, side: str) -> None:  # noqa: B027 - most have fixed names
        """UserError where the side's name contains an unknown part, such as a precision."""

    @abstractmethod
    def check(self, side: str, *, dtype: str, batch: int) -> None:
        """UserError where the side cannot run on this machine, or not with this dtype and batch."""

    def check_model(self, side: str, source: ModelSource) -> None:  # noqa: B027 - most take any model
        """UserError where this side cannot run the model."""

    def get_ready(self, side: str, dtype: torch.dtype) -> None:  # noqa: B027 - most need no more than their imports
        """Imports and compiles all that the side needs besides its weights. Its memory is counted from then on."""

    @abstractmethod
    def convert(self, side: str, source: ModelSource, dtype: str, folder: Path) -> None:
        """Writes the model into `folder` as this side reads it, in its own process. Called only if `converts`."""

    @abstractmethod
    def load(self, side: str, folder: Path, source: ModelSource, dtype: torch.dtype, room: Room) -> Baseline:
        """The side, loaded from the model that `convert` wrote into `folder`. `dtype` is the dtype of the other sides.

        OutOfBudgetError where the side knows beforehand that its memory is not enough.
        """
