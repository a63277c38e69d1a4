"""Where a class keeps the matrices of its experts: in two stacks, or each by itself, as most checkpoints do."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from labkit.models.shards import Cut, Shard

FIRST, SECOND = "ff1", "ff2"  # canonical roles


@dataclass(frozen=True)
class ExpertNames:
    """Names within a layer.

    stacks: of the tensors [E, outputs, inputs] of the first and of the second matrices. A first matrix has the rows of
    the gate, then those of the up projection.
    apart: of the modules of one expert, whose number takes the place of the braces: gate and up, then down.
    count: number of experts if their matrices are stored apart; 0: they are in stacks.
    """

    stacks: tuple[str, str]
    apart: tuple[tuple[str, ...], str]
    count: int = 0

    def as_stored(self, experts: int, within_first_layer: set[str]) -> ExpertNames:
        """The names of a model of `experts` experts, as the names in its first layer show."""
        first = f"{self.apart[1].format(0)}.weight"
        return replace(self, count=experts if first in within_first_layer else 0)

    def of(self, role: str) -> tuple[str, ...]:
        """The stored tensors of a canonical role."""
        if not self.count:
            return (self.stacks[role == SECOND],)
        modules = self.apart[0] if role == FIRST else self.apart[1:]
        return tuple(f"{module.format(expert)}.weight" for expert in range(self.count) for module in modules)

    def cuts(self, shard: Shard, role: str) -> list[Cut | None]:
        """The shard's part of each stored tensor."""
        name = f"{role}.weight"
        whole = shard.cut(name)
        if whole is None:
            return [None] * len(self.of(role))
        inner = shard.of_inner()
        if self.count:
            return [inner if role == FIRST else replace(inner, dim=1)] * len(self.of(role))
        if role == SECOND:
            return [replace(inner, dim=2)]
        halves = 2 if shard.config.gated else 1
        return [Cut(1, whole.ranges[:halves], halves * shard.config.intermediate_size)]

    def stored(self, tensor: Tensor, experts: int) -> list[Tensor]:
        """The stored tensors of a canonical weight [E * outputs, inputs], in the order of `of`."""
        return list(tensor.chunk(self.count)) if self.count else [tensor.unflatten(0, (experts, -1))]
