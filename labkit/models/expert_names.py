"""Names of the tensors in which a class, a checkpoint or a GGUF file keeps the matrices of its experts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from torch import Tensor

from labkit.models.shards import Cut, Shard

FIRST, SECOND = "ff1", "ff2"  # canonical roles
# Modules for the tensors of a GGUF file, which the maps of the package gguf know for every architecture.
GATE_APART = (("mlp.experts.gate_proj", "mlp.experts.up_proj"), "mlp.experts.down_proj")
ROUTER_IN_GGUF = "mlp.gate"
CHOICE_BIAS_IN_GGUF = "mlp.gate.e_score_correction.bias"  # a tensor
SHARED_IN_GGUF = ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")


class ExpertStorage(StrEnum):
    """The ways to keep the matrices of experts."""

    STACKS = "stacks"  # two tensors [E, outputs, inputs]; a first matrix has the gate's rows, then up's
    APART = "apart"  # each matrix by itself, as most checkpoints do
    # GGUF: three tensors [E * outputs, inputs], of the gate, of up and of down; biases [E, outputs]
    GATE_APART = "gate apart"


@dataclass(frozen=True)
class ExpertNames:
    """Names within a layer.

    stacks: of the two tensors. Biases have the same names and the ending `_bias`.
    apart: of the modules of one expert, whose number takes the place of the braces: gate and up, then down.
    alternating: stacks are [E, inputs, outputs], and rows of gate and up alternate (GPT-OSS).
    way: how the tensors at hand are stored.
    count: number of experts.
    """

    stacks: tuple[str, str]
    apart: tuple[tuple[str, ...], str]
    alternating: bool = False
    way: ExpertStorage = ExpertStorage.STACKS
    count: int = 0

    def as_stored(self, experts: int, within_first_layer: set[str]) -> ExpertNames:
        """The names of a model of `experts` experts, as the names in its first layer show."""
        ways = {self.apart[1].format(0): ExpertStorage.APART, GATE_APART[1]: ExpertStorage.GATE_APART}
        stored = (way for module, way in ways.items() if f"{module}.weight" in within_first_layer)
        way = next(stored, ExpertStorage.STACKS)
        return replace(self, way=way, count=experts)

    def other_names(self, choice_bias: str, shared_ff1: tuple[str, ...], gated: bool) -> dict[str, Any]:
        """The fields of a policy with further names in a mixture that are others where the tensors at hand are stored.

        choice_bias, shared_ff1: the fields themselves. gated: first matrices have a gate, which a GGUF file has apart.
        """
        if self.way is not ExpertStorage.GATE_APART:
            return {}
        joined = gated and len(shared_ff1) == 1
        return {
            "router": ROUTER_IN_GGUF,
            "choice_bias": choice_bias and CHOICE_BIAS_IN_GGUF,
            "shared_ff1": SHARED_IN_GGUF if joined else shared_ff1,
        }

    def of(self, role: str, kind: str) -> tuple[str, ...]:
        """The stored tensors of a canonical role. kind: "weight" or "bias"."""
        if self.way is ExpertStorage.STACKS:
            return (self.stacks[role == SECOND] + ("_bias" if kind == "bias" else ""),)
        first, second = GATE_APART if self.way is ExpertStorage.GATE_APART else self.apart
        modules = first if role == FIRST else (second,)
        if self.way is ExpertStorage.GATE_APART:
            return tuple(f"{module}.{kind}" for module in modules)
        return tuple(f"{module.format(expert)}.{kind}" for expert in range(self.count) for module in modules)

    def held(self, role: str, stored: tuple[str, ...], shard: Shard) -> tuple[str, ...]:
        """Returns the stored tensors that have experts of the shard."""
        if self.way is not ExpertStorage.APART:
            return stored
        each = len(self.apart[0]) if role == FIRST else 1
        return stored[shard.experts.start * each : shard.experts.stop * each]

    def cuts(self, shard: Shard, role: str, kind: str, stored: int) -> list[Cut | None]:
        """The shard's part of each of the `stored` tensors that it holds. `arranged` takes its experts out of it."""
        whole = shard.cut(f"{role}.weight")
        if whole is None or (role, kind) == (SECOND, "bias"):
            return [None] * stored
        inner, width = shard.of_inner(), shard.config.intermediate_size
        if self.alternating and self.way is ExpertStorage.STACKS:
            return [_alternating_cut(inner, role, kind)]
        if role == SECOND:
            return [replace(whole, dim=2 if self.way is ExpertStorage.STACKS else 1)] * stored
        if self.way is ExpertStorage.APART:
            return [inner] * stored
        if self.way is ExpertStorage.GATE_APART and kind == "bias":
            return [replace(inner, dim=1)] * stored
        if self.way is ExpertStorage.STACKS:
            halves = 2 if shard.config.gated else 1
            return [Cut(1, whole.ranges[:halves], halves * width)]
        (begin, end), *_ = inner.ranges
        ranges = tuple((expert * width + begin, expert * width + end) for expert in range(self.count))
        return [Cut(0, ranges, self.count * width)] * stored

    def arranged(self, shard: Shard, role: str, kind: str, parts: list[Tensor]) -> list[Tensor]:
        """The stored tensors of a role in pieces: their rows one after the other are the rows of the shard's canonical
        weight. They may have further dimensions, such as the scales of rows.
        """
        own = slice(shard.experts.start, shard.experts.stop)
        if self.way is ExpertStorage.STACKS and self.alternating:
            return [piece for part in parts for expert in part[own] for piece in _rows_in_order(expert, role)]
        if self.way is ExpertStorage.STACKS:
            return [part[own].flatten(0, 1) if part.ndim > 2 else part for part in parts]
        if self.way is ExpertStorage.GATE_APART:
            of_experts = [part[own] if kind == "bias" else part.chunk(self.count)[own] for part in parts]
            return [part for of_expert in zip(*of_experts, strict=True) for part in of_expert]
        return parts

    def stored(self, role: str, tensor: Tensor, experts: int) -> list[Tensor]:
        """The stored tensors of a canonical weight [E * outputs, inputs], in the order of `of`: a stack, or apart."""
        assert self.way is not ExpertStorage.GATE_APART
        if self.way is ExpertStorage.STACKS:
            stack = tensor.unflatten(0, (experts, -1))
            return [_alternating(stack, role) if self.alternating else stack]
        return list(tensor.chunk(len(self.of(role, "weight"))))


def _alternating_cut(inner: Cut, role: str, kind: str) -> Cut:
    """The part of an alternating stack that belongs to some of the numbers between the two matrices. inner: these."""
    if role == SECOND:
        return replace(inner, dim=1)
    ranges = tuple((2 * begin, 2 * end) for begin, end in inner.ranges)
    return Cut(1 if kind == "bias" else 2, ranges, 2 * inner.whole)


def _rows_in_order(expert: Tensor, role: str) -> list[Tensor]:
    """The rows of an expert's canonical matrix or bias, as views of its part of an alternating stack."""
    rows = expert.T if expert.ndim == 2 else expert
    return [rows[::2], rows[1::2]] if role == FIRST else [rows]


def _alternating(stack: Tensor, role: str) -> Tensor:
    """The alternating stack of canonical matrices [E, outputs, inputs], or of biases [E, outputs]."""
    if role == FIRST:
        stack = stack.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return stack.transpose(1, 2) if stack.ndim == 3 else stack
