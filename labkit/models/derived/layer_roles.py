"""The modules of a layer by role, read from their calls in one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from labkit.models.derived.attention_calls import AttentionCall
from labkit.models.derived.head_linears import NotRecognised, before_rotation, linears_of_heads, without_copies
from labkit.models.derived.mixtures import MixtureRole
from labkit.models.derived.norms import is_norm
from labkit.models.derived.rotations import Rotation, is_rotated, rotations
from labkit.models.derived.second_halves import second_half
from labkit.models.observed.calls import ObservedCall, distance, is_linear
from labkit.models.observed.mlps import PlainMlp

SAME = 1e-4  # between tensors that differ by rounding


@dataclass(frozen=True)
class LayerRoles:
    """The modules of a layer by role, relative to the layer, and how they are connected."""

    attention: str
    qkv: tuple[str, ...]
    attn_out: str
    mlp: PlainMlp | MixtureRole
    norm1: str | None  # None: no norm, and no norm2
    norm2: str | None  # None: norm1
    pre_norm: bool  # False: the norms are of the sums after attention and after the MLP
    q_norm: str | None
    k_norm: str | None
    attn_out_norm: str | None
    mlp_out_norm: str | None
    interleaved_qkv: bool
    parallel: bool
    residual_scale: float
    norms_whole: bool
    biases: frozenset[str]
    without_bias: tuple[str, ...]  # linears of a role whose other linears have one
    unread: tuple[str, ...]  # modules that were not called

    @property
    def norms(self) -> list[str]:
        names = (self.norm1, self.norm2, self.attn_out_norm, self.mlp_out_norm, self.q_norm, self.k_norm)
        return [name for name in names if name]


@dataclass(frozen=True)
class Seen:
    """All modules of a model, and their calls in one run."""

    modules: Mapping[str, nn.Module]
    calls: Mapping[str, ObservedCall]

    def layer(self, path: str, attention: AttentionCall) -> tuple[LayerRoles, Rotation | None, AttentionCall]:
        """The roles in the layer at this path, its rotation, and its attention by what the linears gave."""
        inside = {
            name.removeprefix(f"{path}."): call for name, call in self.calls.items() if name.startswith(f"{path}.")
        }
        linears = {name: call for name, call in inside.items() if is_linear(self.at(path, name))}
        norms = {name: call for name, call in inside.items() if is_norm(self.at(path, name), call)}
        context = attention.output.flatten(-2)
        outs = [
            name for name, call in linears.items() if call.x.shape == context.shape and torch.equal(call.x, context)
        ]
        if len(outs) != 1:
            raise NotRecognised("no linear reads the attention's output as it is")
        attn_out = outs[0]
        others = {name: call for name, call in linears.items() if name != attn_out}
        half = second_half(self.modules[path], inside, others, self.calls[path].y)
        qkv = {name: call for name, call in others.items() if name not in half.linears}
        attention = without_copies(qkv, attention)
        names, interleaved = linears_of_heads(qkv, attention)
        before, head_norms = before_rotation(names, qkv, norms, attention)
        attention = _scaled_later(before["query"], attention)
        norm1, norm2, pre_norm = self._norms(path, next(iter(qkv.values())), half.reads, norms)
        out_norm = _norm_after(linears[attn_out], norms)
        mlp_norm = next((norm for call in half.returns if (norm := _norm_after(call, norms))), None)
        roles = {norm1, norm2, out_norm, mlp_norm, *head_norms.values()} - {None}
        if unused := set(norms) - roles:
            raise NotRecognised(f"the norms {', '.join(sorted(unused))} have no role")
        between = norm2 if pre_norm else norm1  # the norm of the sum after attention
        before_mlp = half.reads if between is None else norms[between]
        parallel = before_mlp.reads_as(self.calls[path]) or (norm2 is not None and norm2 == norm1)
        if parallel and isinstance(half.role, MixtureRole):
            raise NotRecognised("a mixture of experts that reads the same rows as the attention")
        added = norms[out_norm].y if out_norm else linears[attn_out].y
        scale = 1.0 if parallel else ratio(before_mlp.x - self.calls[path].x, added, "the residual after attention")
        of_mlp = half.linears if isinstance(half.role, PlainMlp) else ()
        kinds = {"qkv": [*qkv], "attn_out": [attn_out], "ff1": [*of_mlp[:-1]], "ff2": [*of_mlp[-1:]]}
        biased = {kind: self._biased(path, linears) for kind, linears in kinds.items()}
        roles_of_layer = LayerRoles(
            attention=self._paths(path, attention.module),
            qkv=names,
            attn_out=attn_out,
            mlp=half.role,
            norm1=norm1,
            norm2=None if norm2 == norm1 else norm2,
            pre_norm=pre_norm,
            q_norm=head_norms.get("q_norm"),
            k_norm=head_norms.get("k_norm"),
            attn_out_norm=out_norm,
            mlp_out_norm=mlp_norm,
            interleaved_qkv=interleaved,
            parallel=parallel,
            residual_scale=scale,
            norms_whole=any(norms[name].x.shape[-1] != attention.query.shape[-1] for name in head_norms.values()),
            biases=frozenset(kind for kind in kinds if biased[kind]),
            without_bias=tuple(
                name for kind, linears in kinds.items() if biased[kind] for name in linears if name not in biased[kind]
            ),
            unread=self._unread(path, inside),
        )
        return roles_of_layer, self._rotation(before, attention), attention

    def _norms(
        self, path: str, qkv: ObservedCall, up: ObservedCall, norms: Mapping[str, ObservedCall]
    ) -> tuple[str | None, str | None, bool]:
        """The two norms of a layer, and whether they are of the inputs of attention and MLP. If not, they are of the
        sums after both. `qkv`, `up`: calls of the first linears.
        """
        before_attention, before_mlp = norm_before(qkv, norms), norm_before(up, norms)
        last = next((name for name, call in norms.items() if torch.equal(call.y, self.calls[path].y)), None)
        if last is None and (before_attention is None) == (before_mlp is None):
            return before_attention, before_mlp, True
        if last is None or before_attention is not None or last == before_mlp:
            raise NotRecognised("a norm before the attention and none before the MLP, or the other way round")
        return before_mlp, last, False

    def at(self, path: str, name: str) -> nn.Module:
        return self.modules[f"{path}.{name}"]

    def weight(self, path: str) -> Tensor:
        weight: Tensor = self.modules[path].weight  # type: ignore[assignment]
        return weight.detach()

    def path_of(self, module: nn.Module | None) -> str:
        return next((path for path, other in self.modules.items() if other is module), "")

    def _paths(self, layer: str, module: nn.Module) -> str:
        return self.path_of(module).removeprefix(f"{layer}.")

    def _biased(self, path: str, names: Sequence[str]) -> list[str]:
        """The linears with a bias, of these names."""
        return [name for name in names if self.at(path, name).bias is not None]

    def _unread(self, path: str, inside: Mapping[str, ObservedCall]) -> tuple[str, ...]:
        """The outermost modules with weights that a layer has and does not call, such as the attention of a decoder to
        an encoder when the decoder is a model of its own.
        """
        silent: list[str] = []
        for name, module in self.modules[path].named_modules():
            begins = f"{name}."
            if any(begins.startswith(f"{other}.") for other in silent) or next(module.parameters(), None) is None:
                continue
            if name and not any(f"{other}.".startswith(begins) for other in inside):
                silent.append(name)
        return tuple(silent)

    def _rotation(self, before: Mapping[str, Tensor], attention: AttentionCall) -> Rotation | None:
        """The rotation that makes the attention's queries and keys of the second sequence, which has no padding."""
        after = {name: getattr(attention, name)[1].transpose(0, 1) for name in ("query", "key")}
        if all(distance(before[name], after[name]) <= SAME for name in after):
            return None
        for rotation, spec in rotations(self.modules[""]):
            if all(is_rotated(before[name], after[name], spec) for name in after):
                return rotation
        raise NotRecognised("queries and keys change between their linears and the attention, by no known rotation")


def _scaled_later(before: Tensor, attention: AttentionCall) -> AttentionCall:
    """A call whose queries are as the linear gave them, where the model multiplies them instead of the scores."""
    after = attention.query[1].transpose(0, 1)
    factor = float((before * after).sum() / before.square().sum())
    if distance(before * factor, after) > SAME or abs(factor - 1) <= SAME:
        return attention
    return replace(attention, query=attention.query / factor, scale=attention.scale * factor)


def norm_before(call: ObservedCall, norms: Mapping[str, ObservedCall]) -> str | None:
    """The norm whose output this call read."""
    return next((name for name, norm in norms.items() if call.follows(norm)), None)


def _norm_after(call: ObservedCall, norms: Mapping[str, ObservedCall]) -> str | None:
    """The norm that read this call's output."""
    return next((name for name, norm in norms.items() if norm.follows(call)), None)


def ratio(tensor: Tensor, of: Tensor, what: str) -> float:
    """The number by which one tensor is the other's multiple. Raises NotRecognised if there is no such number."""
    factor = float((tensor.double() * of.double()).sum() / of.double().square().sum())
    if distance(of * factor, tensor) > SAME:
        raise NotRecognised(f"{what} is another sum than a row has")
    return float(f"{factor:.5g}")  # the same in all layers, whatever their rounding
