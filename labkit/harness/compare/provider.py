"""Whoever gives sides that are loaded in a way of their own, most of them from files that were written for them."""

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
    """What a side is loaded for: on `threads` threads, `batch` sequences that begin with `prompt` tokens and have up to
    `positions`, in `memory_gb` GB (1e9 bytes; None: no limit).
    """

    threads: int
    batch: int
    prompt: int
    positions: int
    memory_gb: float | None = None


class Provider(ABC):
    """converts: whether its sides read a model that `convert` wrote, and not the vanilla one. staged: whether they run
    on several ranks, each with some of the layers.
    """

    converts: ClassVar[bool] = True
    staged: ClassVar[bool] = False

    def check_name(self, side: str) -> None:  # noqa: B027 - most have fixed names
        """UserError where what is named within the name of the side is unknown."""

    @abstractmethod
    def check(self, side: str, *, dtype: str, batch: int) -> None:
        """UserError where it cannot be a side here, or not of such a case."""

    def check_model(self, side: str, source: ModelSource) -> None:  # noqa: B027 - most take any
        """UserError where this side cannot run the model."""

    def get_ready(self, side: str, dtype: torch.dtype) -> None:  # noqa: B027 - most have nothing but what is imported
        """Import, and compile, what the side needs beside its weights: its memory is counted from then on."""

    @abstractmethod
    def convert(self, side: str, source: ModelSource, dtype: str, folder: Path) -> None:
        """Write the model into `folder` as this side reads it, in a process of its own. Only if it `converts`."""

    @abstractmethod
    def load(self, side: str, folder: Path, source: ModelSource, dtype: torch.dtype, room: Room) -> Baseline:
        """The side, with what `convert` wrote into `folder`. `dtype`: that of the other sides.

        OutOfBudgetError where it knows beforehand that its memory is not enough.
        """
