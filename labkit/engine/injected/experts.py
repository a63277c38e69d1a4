"""Mixtures of experts whose matrices lie in stacks, as transformers' interface of experts describes them.

A module of this kind has the parameters `gate_up_proj` or `up_proj` and `down_proj`, [E, outputs, inputs] or
transposed, and is called with rows, the numbers of the experts chosen for each row, and their shares.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from labkit.engine.alterations import changed_code
from labkit.engine.injected.modules import InjectedModule, float_rows, gemm
from labkit.engine.injected.part_packer import PartPacker
from labkit.engine.team_size import team_size
from labkit.kernels.checks import unchecked
from labkit.kernels.experts import ExpertMlps
from labkit.kernels.experts import experts as checked_experts
from labkit.kernels.mlp_gemm.reference import ACTIVATION
from labkit.kernels.types import NO_NORM, Linear, MlpWeights
from labkit.models.observed.calls import ROUNDING, SCALES, distance

experts = unchecked(checked_experts)
FLAGS = ("has_gate", "has_bias", "is_transposed")  # that transformers' decorator sets
ROWS, CHOICES = 8, 2  # of the trial of a mixture
Between = Callable[[Tensor], Tensor]  # from the outputs of an expert's first matrix to the inputs of its second one


@dataclass(frozen=True)
class StackedExperts:
    """The parameters of a mixture, in the module itself or views of it.

    first, second: [E, outputs, inputs]. biases: [E, outputs] or None. gated: `first` has the rows of a gate, too.
    """

    module: nn.Module
    first: Tensor
    second: Tensor
    first_bias: Tensor | None
    second_bias: Tensor | None
    gated: bool

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """[outputs, inputs] of each matrix."""
        return [(stack.shape[1], stack.shape[2]) for stack in (self.first, self.second) for _ in range(len(stack))]

    def activation(self) -> str | None:
        """The name of the activation, if it is a plain one, or a plain one times the other half; else None."""
        inner = self.second.shape[2]
        between = _between(self.module, gated=self.gated)
        wide = torch.randn(4, self.first.shape[1], generator=torch.Generator().manual_seed(0))
        with torch.no_grad(), suppress(RuntimeError, TypeError, ValueError):
            for name, activation in ACTIVATION.items():
                ways = (
                    (between(x), activation(x[:, :inner]) * x[:, inner:] if self.gated else activation(x))
                    for x in (wide * scale for scale in SCALES)
                )
                if all(distance(theirs, ours) <= ROUNDING[torch.float32] for theirs, ours in ways):
                    return name
        return None

    def between(self) -> Between:
        """What the module computes between its matrices. It does not keep them in memory."""
        light = copy.copy(self.module)
        light._parameters = {}
        return _between(light, gated=self.gated)


def _between(module: Any, *, gated: bool) -> Between:
    """A method of a module, which needs none of its parameters."""
    function: Between = module._apply_gate if gated else module.act_fn
    return function


def stacked_experts(module: nn.Module) -> StackedExperts | None:
    """The stacks of a module that is a mixture of experts and nothing else; None: it is something else."""
    stored: Any = module
    if not all(hasattr(module, flag) for flag in FLAGS) or changed_code(module):
        return None
    first = "gate_up_proj" if stored.has_gate else "up_proj"
    names = {first, "down_proj"} | ({f"{first}_bias", "down_proj_bias"} if stored.has_bias else set())
    parameters = dict(module.named_parameters())
    if set(parameters) != names or getattr(module, "has_post_expert_norm", False):
        return None
    dims = {name: 2 if name.endswith("bias") else 3 for name in names}
    if any(parameters[name].dim() != dims[name] or not parameters[name].is_floating_point() for name in names):
        return None
    ups, downs = (parameters[name].detach() for name in (first, "down_proj"))
    if stored.is_transposed:
        ups, downs = ups.transpose(1, 2), downs.transpose(1, 2)
    up_bias, down_bias = (
        parameters[f"{name}_bias"].detach() if stored.has_bias else None for name in (first, "down_proj")
    )
    return StackedExperts(module, ups, downs, up_bias, down_bias, bool(stored.has_gate))


class InjectedMixture(InjectedModule):
    """A mixture of experts on packed matrices, called as transformers' own."""


class InjectedExperts(InjectedMixture):
    """A mixture of experts in one call. A number that is no expert's adds nothing."""

    def __init__(self, mlps: ExpertMlps, dtype: torch.dtype) -> None:
        first, last = mlps.regions[0].up, mlps.outs[0]
        super().__init__(dtype, last.outputs, first.inputs)
        self.mlps, self.num_experts = mlps, len(mlps.outs)
        self.matrices = (*(region.up for region in mlps.regions), *mlps.outs)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        rows, chosen, shares = _routed(hidden_states, top_k_index, top_k_weights)
        out = experts(rows, chosen, shares, self.mlps, threads=team_size(), impl="cpp")
        return out.to(hidden_states.dtype).view(hidden_states.shape)


class ExpertsApart(InjectedMixture):
    """A mixture of experts, two products for each expert that a row chose, with transformers' own code between them."""

    def __init__(
        self, first: tuple[Linear, ...], second: tuple[Linear, ...], between: Between, dtype: torch.dtype
    ) -> None:
        super().__init__(dtype, second[0].outputs, first[0].inputs)
        self.first, self.second, self.num_experts = first, second, len(first)
        self.between = between
        self.matrices = (*first, *second)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        rows, chosen, shares = _routed(hidden_states, top_k_index, top_k_weights)
        out = rows.new_zeros(len(rows), self.out_features)
        for number in chosen.unique().tolist():
            if not 0 <= number < self.num_experts:
                continue
            row, choice = (chosen == number).nonzero(as_tuple=True)
            wide = gemm(rows[row], self.first[number], threads=team_size(), impl="cpp")
            act = float_rows(self.between(wide.to(self.dtype)))
            y = gemm(act, self.second[number], threads=team_size(), impl="cpp")
            out.index_add_(0, row, y * shares[row, choice, None])
        return out.to(hidden_states.dtype).view(hidden_states.shape)


def _routed(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = float_rows(hidden_states)
    return rows, top_k_index.reshape(len(rows), -1).long().contiguous(), float_rows(top_k_weights)


def experts_instead(stacked: StackedExperts, packer: PartPacker, dtype: torch.dtype) -> InjectedMixture:
    """A module that computes the same mixture on packed matrices. dtype: of the activations around it."""
    activation = stacked.activation()
    gated = activation is not None and stacked.gated
    first = packer.stack(stacked.first, stacked.first_bias, gated=gated)
    second = packer.stack(stacked.second, stacked.second_bias)
    if activation is None:
        return ExpertsApart(first, second, stacked.between(), dtype)
    regions = tuple(MlpWeights(NO_NORM, up, activation, gated) for up in first)
    return InjectedExperts(ExpertMlps(regions, second), dtype)


def routed_rows(stacked: StackedExperts) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments of a mixture: random rows, chosen experts and shares."""
    generator = torch.Generator().manual_seed(0)
    count, dtype = len(stacked.first), stacked.first.dtype
    rows = torch.randn(ROWS, stacked.first.shape[2], generator=generator)
    chosen = torch.stack([torch.randperm(count, generator=generator)[:CHOICES] for _ in range(ROWS)])
    return rows.to(dtype), chosen, torch.rand(chosen.shape, generator=generator).to(dtype)
