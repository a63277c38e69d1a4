"""The second half of a layer: its MLP or mixture of experts, and the calls around it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor, nn

from labkit.models.derived.head_linears import NotRecognised
from labkit.models.derived.mixtures import SAME, MixtureRole, is_routed, recognised_mixture
from labkit.models.observed.calls import SCALES, ObservedCall, distance
from labkit.models.observed.mlps import PlainMlp, mlp_of_calls


@dataclass(frozen=True)
class SecondHalf:
    """An MLP or a mixture.

    reads: a call that reads its input.
    returns: calls that return its output. A module around the MLP's last linear may change it.
    linears: the names of its linears, which are not of the attention.
    """

    role: PlainMlp | MixtureRole
    reads: ObservedCall
    returns: tuple[ObservedCall, ...]
    linears: tuple[str, ...]


def second_half(
    layer: nn.Module, inside: Mapping[str, ObservedCall], linears: Mapping[str, ObservedCall], rows: Tensor
) -> SecondHalf:
    """The second half of a layer. inside: calls of all its modules. linears: calls that may be of this half. rows: of
    the layer's output.
    """
    modules = dict(layer.named_modules())
    mlp = _mlp(linears, rows.shape[-1])
    around = [name for name in inside if name and mlp and mlp.down.startswith(f"{name}.")]
    if mlp and around:
        _check_all_rows(mlp, modules, around[-1], inside)
    experts = next((name for name, call in inside.items() if name and is_routed(modules[name], call)), None)
    if experts is None:
        if mlp is None:
            raise NotRecognised("no MLP of two or three linears and a known activation")
        returns = (linears[mlp.down], *(inside[name] for name in around[:1]))
        return SecondHalf(mlp, inside[mlp.up], returns, mlp.linears)
    blocks = [name for name in inside if name and experts.startswith(f"{name}.")]
    block = max(blocks, key=len, default="")
    if not block or not inside[block].alone or inside[block].x.shape != rows.shape:
        raise NotRecognised("experts in a module that takes or returns more than rows")
    call = inside[block]
    role = recognised_mixture(layer, experts, block, call.x, linears, mlp)
    others = [name for name in (role.router, role.shared_gate) if name in linears]
    of_half = (*others, *(mlp.linears if mlp else ()))
    if biased := [name for name in (*of_half, role.router) if getattr(modules[name], "bias", None) is not None]:
        raise NotRecognised(f"a mixture with a bias of {biased[0]}")
    if mlp is not None and not torch.equal(linears[mlp.up].x.reshape(call.x.shape), call.x):
        raise NotRecognised("a shared expert that gets other rows than the experts")
    return SecondHalf(role, call, (call,), of_half)


def _check_all_rows(
    mlp: PlainMlp, modules: Mapping[str, nn.Module], path: str, inside: Mapping[str, ObservedCall]
) -> None:
    """Raises NotRecognised if the module around an MLP is this MLP, but not for small or large rows. A clamp shows on
    large rows alone.
    """
    call = inside[path]
    if not call.alone or call.x.shape != inside[mlp.up].x.shape or not torch.equal(call.x, inside[mlp.up].x):
        return
    with torch.no_grad():
        if call.y.shape != inside[mlp.down].y.shape or distance(mlp.outputs(modules, call.x), call.y) > SAME:
            return
        for x in (call.x * scale for scale in SCALES):
            if distance(mlp.outputs(modules, x), modules[path](x)) > SAME:
                raise NotRecognised("an MLP that is another one for small or large rows")


def _mlp(linears: Mapping[str, ObservedCall], hidden: int) -> PlainMlp | None:
    for down, call in linears.items():
        inner = call.x.shape[-1]
        first = {name: other for name, other in linears.items() if name != down and other.y.shape[-1] == inner}
        pairs = [pair for pair in combinations(first, 2) if first[pair[0]].reads_as(first[pair[1]])]
        singles = [
            (name,) for name, other in linears.items() if name != down and other.y.shape[-1] in (inner, 2 * inner)
        ]
        for names in (*pairs, *singles) if call.y.shape[-1] == hidden else ():
            if found := mlp_of_calls(names, down, linears):
                return found
    return None
