"""The mixture of experts of a layer, recognised by what its modules compute.

A mixture is a module that contains a module of experts: stacks of matrices, which are called with rows, the numbers of
the experts of each row, and their shares. The mixture is run again on small and on large rows, and each of these
numbers has to be what a row of policies can say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from labkit.kernels.mlp_gemm.reference import ACTIVATION
from labkit.models.config import SCORES
from labkit.models.derived.head_linears import NotRecognised
from labkit.models.observed.calls import SCALES, ObservedCall, distance, tensors_in
from labkit.models.observed.mlps import PlainMlp

SAME = 1e-4  # between tensors that differ by rounding
FORCED = 4.0  # between the choice biases of two experts, whose scores are at most 1
VANISHED = 1e-12  # a sum of scores below which models add an epsilon to it


@dataclass(frozen=True)
class MixtureRole:
    """A mixture by its modules, relative to the layer, and what its router computes.

    experts: the module with the stacks of matrices, whose names in it are `first` and `second`.
    router: the module whose weight makes the logits. choice_bias: a tensor, or empty. Its shape has -1 for the experts.
    count, chosen, renormalised, scores, factor: as `ExpertsSpec` has them.
    shared: the shared expert. shared_gate: a linear, or empty.
    """

    experts: str
    first: str
    second: str
    activation: str
    gated: bool
    router: str
    choice_bias: str
    count: int
    chosen: int
    renormalised: bool
    scores: str
    factor: float
    shared: PlainMlp | None
    shared_gate: str
    choice_bias_shape: tuple[int, ...] = (-1,)

    @property
    def stacks(self) -> tuple[str, str]:
        return f"{self.experts}.{self.first}", f"{self.experts}.{self.second}"


@dataclass(frozen=True)
class MixtureRun:
    """A run of a mixture: rows [N, H], the experts of each row and their shares [N, K], the sum over them [N, H], and
    the output of the whole mixture [N, H].
    """

    rows: Tensor
    chosen: Tensor
    shares: Tensor
    summed: Tensor
    output: Tensor


@dataclass(frozen=True)
class Choice:
    """What a router computes; see `MixtureRole`."""

    router: str
    choice_bias: str
    scores: str
    renormalised: bool
    factor: float


def is_routed(module: nn.Module, call: ObservedCall) -> bool:
    """Whether a module is called as a mixture's experts are."""
    stacks = [parameter for parameter in module.parameters(recurse=False) if parameter.dim() == 3]
    return len(stacks) > 1 and _routing(call.others) is not None


def _routing(others: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
    """The numbers of experts and the shares among the arguments of a module after its rows."""
    numbers = [tensor for tensor in others if not tensor.is_floating_point() and tensor.dim() == 2]
    shares = [tensor for tensor in others if tensor.is_floating_point() and tensor.dim() == 2]
    if len(others) != 2 or not numbers or not shares or numbers[0].shape != shares[0].shape:
        return None
    return numbers[0], shares[0]


def recognised_mixture(
    layer: nn.Module, experts: str, block: str, rows: Tensor, linears: Mapping[str, ObservedCall], mlp: PlainMlp | None
) -> MixtureRole:
    """The mixture at the path `block` of a layer, whose experts are at the path `experts`. rows: of a run.

    linears: calls that are not of the attention. mlp: the MLP among them, which is the shared expert.
    Raises NotRecognised with the first thing that a row cannot say.
    """
    modules = dict(layer.named_modules())
    runs = list(_runs(modules[block], modules[experts], rows))
    first, second, activation, gated = _stacks(modules[experts], runs)
    count = getattr(modules[experts], first).shape[0]
    choice = _choice(layer, count, runs)
    if choice.choice_bias:
        _check_unlikely_experts(layer, choice, lambda: _runs(modules[block], modules[experts], rows))
    gates = [name for name, call in linears.items() if call.y.shape[-1] == 1 and name != choice.router]
    gate = gates[0] if mlp and gates else ""

    def shared_output(x: Tensor) -> Tensor:
        assert mlp is not None
        y = mlp.outputs(modules, x)
        return modules[gate](x).sigmoid() * y if gate else y

    inside = mlp is not None and mlp.down.startswith(f"{block}.")
    if gate and not inside:
        raise NotRecognised("a gate of a shared expert that is no part of the mixture")
    factor = _factor_of_the_sum(runs, shared_output if inside else None)
    return MixtureRole(
        experts,
        first,
        second,
        activation,
        gated,
        choice.router,
        choice.choice_bias,
        count,
        runs[0].chosen.shape[1],
        choice.renormalised,
        choice.scores,
        float(f"{factor * choice.factor:.4g}"),
        mlp,
        gate,
        (1, -1) if choice.choice_bias and layer.state_dict()[choice.choice_bias].dim() == 2 else (-1,),
    )


def _runs(block: nn.Module, experts: nn.Module, rows: Tensor) -> Iterator[MixtureRun]:
    """Runs of a mixture on rows of several sizes, the rows themselves first. Rows whose shares are no numbers are left
    out.
    """
    seen: list[tuple[Sequence[Tensor], Tensor]] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        seen.append((tensors_in(args, kwargs), output))

    handle = experts.register_forward_hook(note, with_kwargs=True)
    try:
        for scale in sorted(SCALES, key=lambda scale: scale != 1):
            with torch.no_grad():
                output = block(rows * scale)
            (x, *others), summed = seen.pop()
            routing = _routing(others)
            if seen or routing is None or not isinstance(output, Tensor) or output.shape != rows.shape:
                raise NotRecognised("a mixture whose experts are not called once")
            # A class may divide 0 by 0 where the scores of all chosen experts vanish (MiniMax-M2).
            numbers = routing[1].isfinite().all(1)
            if not bool(numbers.any()):
                raise NotRecognised("a mixture whose shares are no numbers")
            run = (x, *routing, summed.view(x.shape), output.view(x.shape))
            yield MixtureRun(*(tensor[numbers] for tensor in run))
            if not torch.equal(x, (rows * scale).view(x.shape)):
                raise NotRecognised("experts that get other rows than the mixture")
    finally:
        handle.remove()


def _stacks(experts: nn.Module, runs: Sequence[MixtureRun]) -> tuple[str, str, str, bool]:
    """The names of the two stacks, the activation, and whether the first one has gate rows, then up rows."""
    stacks = dict(experts.named_parameters())
    hidden = runs[0].rows.shape[1]
    for first, second in ((a, b) for a, b in product(stacks, repeat=2) if a != b and len(stacks) == 2):
        count, wide, inputs = stacks[first].shape
        inner = stacks[second].shape[-1]
        if stacks[second].shape != (count, hidden, inner) or inputs != hidden or wide not in (inner, 2 * inner):
            continue
        for activation, function in ACTIVATION.items():
            sums = (
                _sum_of_experts(run, stacks[first].detach(), stacks[second].detach(), function, wide != inner)
                for run in runs
            )
            if all(distance(ours, run.summed) <= SAME for ours, run in zip(sums, runs, strict=True)):
                return first, second, activation, wide != inner
    raise NotRecognised("experts that compute something else than two matrices and a known activation")


def _sum_of_experts(
    run: MixtureRun, first: Tensor, second: Tensor, activation: Callable[[Tensor], Tensor], gated: bool
) -> Tensor:
    """The outputs of each row's experts, times their shares."""
    total = torch.zeros_like(run.summed)
    for number, (up, down) in enumerate(zip(first, second, strict=True)):
        share = run.shares.masked_fill(run.chosen != number, 0).sum(1, keepdim=True)
        wide = functional.linear(run.rows, up)
        act = activation(wide.chunk(2, -1)[0]) * wide.chunk(2, -1)[1] if gated else activation(wide)
        total += share * functional.linear(act, down)
    return total


def _choice(layer: nn.Module, count: int, runs: Sequence[MixtureRun]) -> Choice:
    """The router of a layer with `count` experts, such that all runs chose as it does."""
    tensors = {name: tensor for name, tensor in layer.state_dict().items() if tensor.is_floating_point()}
    routers = [
        name.removesuffix(".weight")
        for name, tensor in tensors.items()
        if tensor.shape == (count, runs[0].rows.shape[1]) and name.endswith(".weight")
    ]
    biases = [name for name, tensor in tensors.items() if tensor.shape in ((count,), (1, count))]
    for router, bias, scores, renormalised in product(routers, (*biases, ""), SCORES, (False, True)):
        weight, added = tensors[f"{router}.weight"], tensors[bias].flatten() if bias else None
        of_runs = [_factor_of_shares(run, weight, added, scores, renormalised) for run in runs]
        factors = [factor for factor in of_runs if factor is not None]
        if len(factors) == len(runs) and all(abs(factor - factors[0]) <= SAME * abs(factor) for factor in factors):
            return Choice(router, bias, scores, renormalised, factors[0])
    raise NotRecognised("a router that no row describes: its experts or their shares are others")


def _check_unlikely_experts(layer: nn.Module, choice: Choice, run: Callable[[], Iterator[MixtureRun]]) -> None:
    """Raises NotRecognised if the shares are others where the choice bias forces the same experts on all rows, some of
    which have small scores for them. A least sum of scores shows there alone. run: runs the mixture.
    """
    tensors = layer.state_dict()
    weight, bias = tensors[f"{choice.router}.weight"], tensors[choice.choice_bias]
    before, forced = bias.clone(), FORCED * torch.arange(len(weight)).view_as(bias)
    bias.copy_(forced)
    try:
        for forced_run in run():
            factor = _factor_of_shares(forced_run, weight, bias.flatten(), choice.scores, choice.renormalised)
            if factor is None or abs(factor - choice.factor) > SAME * abs(factor):
                raise NotRecognised("a router that no row describes: shares of unlikely experts are others")
    finally:
        bias.copy_(before)


def _factor_of_shares(
    run: MixtureRun, weight: Tensor, bias: Tensor | None, scores: str, renormalised: bool
) -> float | None:
    """A run's shares divided by the scores of such a router. None: they have no common quotient, or the router would
    choose other experts.
    """
    logits = functional.linear(run.rows, weight)
    of_experts = logits.sigmoid() if scores == "sigmoid" else logits.softmax(-1)
    compared = of_experts if bias is None else of_experts + bias
    if int(run.chosen.max()) >= len(weight) or any(len(row.unique()) < len(row) for row in run.chosen):
        return None
    largest = compared.topk(run.chosen.shape[1]).values
    # Models are free in the choice among equal scores, so the scores are compared instead of the experts.
    if distance(compared.gather(1, run.chosen).sort(descending=True).values, largest) > SAME:
        return None
    kept = of_experts.gather(1, run.chosen)
    total = kept.sum(1, keepdim=True)
    expected = kept / total if renormalised else kept
    counts = total[:, 0] > VANISHED
    shares, expected = run.shares[counts].double(), expected[counts].double()
    factor = float((shares * expected).sum() / expected.square().sum())
    return factor if distance(expected * factor, shares) <= SAME else None


def _factor_of_the_sum(runs: Sequence[MixtureRun], shared: Callable[[Tensor], Tensor] | None) -> float:
    """The number by which a mixture multiplies the sum over experts, before the shared expert is added."""
    factors: list[float] = []
    for run in runs:
        with torch.no_grad():
            rest = run.output - shared(run.rows) if shared else run.output
        factor = float((rest.double() * run.summed.double()).sum() / run.summed.double().square().sum())
        expected = factor * run.summed + (run.output - rest)
        if distance(expected, run.output) > SAME or abs(factor - (factors or [factor])[0]) > SAME * abs(factor):
            raise NotRecognised("the mixture is another sum of its experts than a row has")
        factors.append(factor)
    return factors[0]
