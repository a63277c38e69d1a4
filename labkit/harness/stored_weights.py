"""How a side keeps its matrices where a torch dtype does not say it: few bits a number, in blocks that share scales."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from labkit.models.dtypes import DTYPES


class StoredWeights(BaseModel):
    """A type of weights by the name that its library gives it, and what it takes of the memory.

    bits: of a number in the layers' matrices, with its share of the scales, on average. head: the type of the LM head,
    by name, and `head_bits` those of a number in it. computes: the torch dtype that serves prompts.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    bits: float
    head: str
    head_bits: float
    computes: str

    def __str__(self) -> str:
        return self.name if self.head == self.name else f"{self.name}, LM head {self.head}"

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.computes]


Weights = torch.dtype | StoredWeights


def name_of(weights: Weights) -> str:
    """As records have it: "bfloat16", "int8", "Q4_0"."""
    return weights.name if isinstance(weights, StoredWeights) else str(weights).removeprefix("torch.")


def as_plain(weights: Weights) -> str | dict[str, Any]:
    """As JSON carries it from process to process."""
    return weights.model_dump() if isinstance(weights, StoredWeights) else name_of(weights)


def from_plain(told: str | dict[str, Any]) -> Weights:
    """What `as_plain` was given."""
    return DTYPES[told] if isinstance(told, str) else StoredWeights.model_validate(told)
