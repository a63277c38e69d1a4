"""Plain MLPs, recognised by what they compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from labkit.kernels.mlp_gemm.reference import ACTIVATION
from labkit.models.observed.calls import ROUNDING, SCALES, ObservedCall, distance


@dataclass(frozen=True)
class PlainMlp:
    """An MLP that is down(activation(gate(x)) * up(x)), or down(activation(up(x))) without a gate.

    gate, up, down: paths of its linears.
    halves: gate and up are the two halves of the matrix `up`, the gate first if `gate_first`.
    """

    up: str
    down: str
    activation: str
    gate: str | None = None
    halves: bool = False
    gate_first: bool = True

    @property
    def gated(self) -> bool:
        return self.halves or self.gate is not None

    @property
    def linears(self) -> tuple[str, ...]:
        return (*([self.gate] if self.gate else []), self.up, self.down)

    def act(self, output_of: Callable[[str], Tensor]) -> Tensor:
        """The inputs of the last linear. output_of: what the linear at a path returns."""
        activation, up = ACTIVATION[self.activation], output_of(self.up)
        if self.halves:
            first, second = up.chunk(2, dim=-1)
            gate, up = (first, second) if self.gate_first else (second, first)
            return activation(gate) * up
        return activation(up) if self.gate is None else activation(output_of(self.gate)) * up

    def outputs(self, linears: Mapping[str, nn.Module], x: Tensor) -> Tensor:
        output: Tensor = linears[self.down](self.act(lambda path: linears[path](x)))
        return output


def may_be_mlp(module: nn.Module, linears: Mapping[str, nn.Module]) -> bool:
    """Whether all parameters of a module belong to two or three of its children, which are among these linears."""
    ours = set(map(id, linears.values()))
    children = [child for child in module.children() if id(child) in ours]
    parameters = {id(parameter) for child in children for parameter in child.parameters()}
    return len(children) in (2, 3) and parameters == {id(parameter) for parameter in module.parameters()}


def plain_mlp(
    module: nn.Module, call: ObservedCall, linears: Mapping[str, nn.Module], calls: Mapping[str, ObservedCall]
) -> PlainMlp | None:
    """The parts of an MLP; None if it computes anything else. `linears`: of the module; `calls`: of a run."""
    paths = [path for path in calls if path in linears]
    if len(paths) != len(linears):
        return None
    *first, down = paths
    if not all(calls[path].reads_as(call) for path in first):
        return None
    if (found := mlp_of_calls(first, down, calls)) is None:
        return None
    inputs = [call.x * scale for scale in SCALES]
    tolerance = ROUNDING[call.y.dtype]
    same = all(distance(found.outputs(linears, x), module(x)) <= tolerance for x in inputs)
    return found if same else None


def mlp_of_calls(first: Sequence[str], down: str, calls: Mapping[str, ObservedCall]) -> PlainMlp | None:
    """The MLP whose first linears and last linear these are, as far as their calls show."""
    for candidate in _candidates(first, down, calls):
        act, expected = candidate.act(lambda path: calls[path].y), calls[down].x
        if act.shape == expected.shape and distance(act, expected) <= ROUNDING[expected.dtype]:
            return candidate
    return None


def _candidates(first: Sequence[str], down: str, calls: Mapping[str, ObservedCall]) -> list[PlainMlp]:
    inner, wide = calls[down].x.shape[-1], calls[first[0]].y.shape[-1]
    candidates = []
    for activation in ACTIVATION:
        if len(first) == 2:
            candidates += [PlainMlp(up, down, activation, gate) for gate, up in (first, first[::-1])]
        elif wide == 2 * inner:
            candidates += [PlainMlp(first[0], down, activation, halves=True, gate_first=way) for way in (True, False)]
        else:
            candidates.append(PlainMlp(first[0], down, activation))
    return candidates
