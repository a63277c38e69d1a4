"""Reads what a small model computes from the calls of its modules: which module has which role, and in what order.

What is read is a proposal. Whether the kernels compute the same as the model is proved afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from labkit.models.derived.attention_calls import AttentionCall, observed_attention
from labkit.models.derived.head_linears import NotRecognised, before_rotation, linears_of_heads
from labkit.models.derived.norms import NormKind, norm_kind
from labkit.models.derived.rotations import Rotation, is_rotated, rotations
from labkit.models.observed.calls import ObservedCall, calls_of, distance, is_linear
from labkit.models.observed.mlps import PlainMlp, mlp_of_calls

SAME = 1e-4  # between tensors that differ by rounding


@dataclass(frozen=True)
class LayerRoles:
    """The modules of a layer by role, relative to the layer, and how they are connected."""

    attention: str
    qkv: tuple[str, ...]
    attn_out: str
    mlp: PlainMlp
    norm1: str | None  # None: no norm, and no norm2
    norm2: str | None  # None: norm1
    q_norm: str | None
    k_norm: str | None
    attn_out_norm: str | None
    mlp_out_norm: str | None
    interleaved_qkv: bool
    parallel: bool
    residual_scale: float
    norms_whole: bool
    biases: frozenset[str]


@dataclass(frozen=True)
class ModelRoles:
    """The modules of a model by role, and what is computed before and after its layers."""

    layers: str
    layer: LayerRoles
    rotations: tuple[Rotation | None, ...]  # of each layer
    norm: NormKind
    tokens: str
    positions: str | None
    position_offset: int
    positions_from_mask: bool
    embed_norm: str | None
    embedding_scale: float
    final_norm: str | None
    head: str
    logits: tuple[str, float]  # "as they are", "scaled" or "capped", and the number
    calls: tuple[AttentionCall, ...]  # of each layer


def recognise(model: PreTrainedModel) -> ModelRoles:
    """The roles of a small model's modules. Raises NotRecognised with the first thing that a row cannot say."""
    modules: dict[str, nn.Module] = dict(model.named_modules())
    layers = _layers(model, modules)
    with observed_attention(model.config) as attention:
        calls = calls_of(model, modules)
    count = len(modules[layers])  # type: ignore[arg-type]
    if len(attention) != count:
        raise NotRecognised(f"{len(attention)} calls of an attention function in {count} layers, expected one in each")
    seen = Seen(modules, calls)
    found = [seen.layer(f"{layers}.{index}", call) for index, call in enumerate(attention)]
    roles, turns = [layer for layer, _ in found], tuple(rotation for _, rotation in found)
    if any(layer != roles[0] for layer in roles):
        raise NotRecognised("layers of several kinds")
    return seen.model(model, layers, roles[0], turns, tuple(attention))


def _layers(model: PreTrainedModel, modules: Mapping[str, nn.Module]) -> str:
    count = model.config.get_text_config().num_hidden_layers
    lists = [path for path, module in modules.items() if isinstance(module, nn.ModuleList) and len(module) == count]
    if not lists:
        raise NotRecognised(f"no list of {count} layers")
    return max(lists, key=lambda path: sum(tensor.numel() for tensor in modules[path].parameters()))


@dataclass(frozen=True)
class Seen:
    """All modules of a model, and their calls in one run."""

    modules: Mapping[str, nn.Module]
    calls: Mapping[str, ObservedCall]

    def layer(self, path: str, attention: AttentionCall) -> tuple[LayerRoles, Rotation | None]:
        """The roles in the layer at this path, and its rotation."""
        inside = {
            name.removeprefix(f"{path}."): call for name, call in self.calls.items() if name.startswith(f"{path}.")
        }
        linears = {name: call for name, call in inside.items() if is_linear(self._at(path, name))}
        norms = {name: call for name, call in inside.items() if _is_norm(self._at(path, name))}
        context = attention.output.flatten(-2)
        outs = [
            name for name, call in linears.items() if call.x.shape == context.shape and torch.equal(call.x, context)
        ]
        if len(outs) != 1:
            raise NotRecognised("no linear reads the attention's output as it is")
        attn_out = outs[0]
        others = {name: call for name, call in linears.items() if name != attn_out}
        mlp = _mlp(others, self.calls[path].y.shape[-1])
        qkv = {name: call for name, call in others.items() if name not in mlp.linears}
        names, interleaved = linears_of_heads(qkv, attention)
        before, head_norms = before_rotation(names, qkv, norms, attention)
        reads = next(iter(qkv.values()))
        norm1, norm2 = _followed(reads, norms), _followed(inside[mlp.up], norms)
        if (norm1 is None) != (norm2 is None):
            raise NotRecognised("a norm before the attention and none before the MLP, or the other way round")
        whole = next((call for name, call in inside.items() if name and mlp.down.startswith(f"{name}.")), None)
        out_norm = _following(linears[attn_out], norms)
        mlp_norm = _following(linears[mlp.down], norms)
        if mlp_norm is None and whole is not None:
            mlp_norm = _following(whole, norms)
        roles = {norm1, norm2, out_norm, mlp_norm, *head_norms.values()} - {None}
        if unused := set(norms) - roles:
            raise NotRecognised(f"the norms {', '.join(sorted(unused))} have no role")
        before_mlp = inside[mlp.up] if norm2 is None else norms[norm2]
        parallel = before_mlp.reads_as(self.calls[path]) or (norm2 is not None and norm2 == norm1)
        added = norms[out_norm].y if out_norm else linears[attn_out].y
        scale = 1.0 if parallel else _ratio(before_mlp.x - self.calls[path].x, added, "the residual after attention")
        kinds = {"qkv": [*qkv], "attn_out": [attn_out], "ff1": [*mlp.linears[:-1]], "ff2": [mlp.down]}
        roles_of_layer = LayerRoles(
            attention=self._paths(path, attention.module),
            qkv=names,
            attn_out=attn_out,
            mlp=mlp,
            norm1=norm1,
            norm2=None if norm2 == norm1 else norm2,
            q_norm=head_norms.get("q_norm"),
            k_norm=head_norms.get("k_norm"),
            attn_out_norm=out_norm,
            mlp_out_norm=mlp_norm,
            interleaved_qkv=interleaved,
            parallel=parallel,
            residual_scale=scale,
            norms_whole=any(norms[name].x.shape[-1] != attention.query.shape[-1] for name in head_norms.values()),
            biases=frozenset(kind for kind, paths in kinds.items() if self._have_biases(path, kind, paths)),
        )
        return roles_of_layer, self._rotation(before, attention)

    def model(
        self,
        model: PreTrainedModel,
        layers: str,
        layer: LayerRoles,
        turns: tuple[Rotation | None, ...],
        attention: tuple[AttentionCall, ...],
    ) -> ModelRoles:
        """The roles of the whole model, around the layers."""
        if special := sorted({name for call in attention for name in call.special}):
            raise NotRecognised(f"the attention function gets {', '.join(special)}")
        outside = {name: call for name, call in self.calls.items() if name and not f"{name}.".startswith(f"{layers}.")}
        norms = {name: call for name, call in outside.items() if _is_norm(self.modules[name])}
        tables = {name: call for name, call in outside.items() if isinstance(self.modules[name], nn.Embedding)}
        tokens = self._path_of(model.get_input_embeddings())
        head = self._path_of(model.get_output_embeddings())
        if tokens not in tables or head not in outside:
            raise NotRecognised("no embedding of tokens, or no linear for the logits")
        final_norm = _followed(outside[head], norms)
        begun = self.calls[f"{layers}.0"].x
        embed_norm = next((name for name, call in norms.items() if torch.equal(call.y, begun)), None)
        positions = [name for name, call in tables.items() if name != tokens and call.y.shape[-1] == begun.shape[-1]]
        if len(positions) > 1 or len(norms) > bool(final_norm) + bool(embed_norm):
            raise NotRecognised("more embeddings or norms outside of the layers than a row has")
        token_ids, stored = tables[tokens].x, self._weight(tokens)
        rows = stored[token_ids]
        offset, from_mask = 0, False
        if positions:
            ids = tables[positions[0]].x.broadcast_to(token_ids.shape)
            offset, from_mask = int(ids[1, 0]), bool(ids[0, 2] == ids[1, 0])
            begun = begun - tables[positions[0]].y
        of_norms = {self._at(f"{layers}.0", name) for name in _names(layer)} | {
            self.modules[name] for name in (final_norm, embed_norm) if name
        }
        return ModelRoles(
            layers=layers,
            layer=layer,
            rotations=turns,
            norm=_one_kind(list(of_norms)),
            tokens=tokens,
            positions=positions[0] if positions else None,
            position_offset=offset,
            positions_from_mask=from_mask,
            embed_norm=embed_norm,
            embedding_scale=1.0 if embed_norm else _ratio(begun, rows, "the input of the layers"),
            final_norm=final_norm,
            head=head,
            logits=_logits(self.calls[""].y, outside[head].y, model.config),
            calls=attention,
        )

    def _at(self, path: str, name: str) -> nn.Module:
        return self.modules[f"{path}.{name}"]

    def _weight(self, path: str) -> Tensor:
        weight: Tensor = self.modules[path].weight  # type: ignore[assignment]
        return weight.detach()

    def _path_of(self, module: nn.Module | None) -> str:
        return next((path for path, other in self.modules.items() if other is module), "")

    def _paths(self, layer: str, module: nn.Module) -> str:
        return self._path_of(module).removeprefix(f"{layer}.")

    def _have_biases(self, path: str, kind: str, names: Sequence[str]) -> bool:
        have = {self._at(path, name).bias is not None for name in names}
        if len(have) > 1:
            raise NotRecognised(f"some of the linears of {kind} have a bias, and others have none")
        return have.pop()

    def _rotation(self, before: Mapping[str, Tensor], attention: AttentionCall) -> Rotation | None:
        """The rotation that makes the attention's queries and keys of the second sequence, which has no padding."""
        after = {name: getattr(attention, name)[1].transpose(0, 1) for name in ("query", "key")}
        if all(distance(before[name], after[name]) <= SAME for name in after):
            return None
        for rotation, spec in rotations(self.modules[""]):
            if all(is_rotated(before[name], after[name], spec) for name in after):
                return rotation
        raise NotRecognised("queries and keys change between their linears and the attention, by no known rotation")


def _is_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 1 and next(module.children(), None) is None


def _mlp(linears: Mapping[str, ObservedCall], hidden: int) -> PlainMlp:
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
    raise NotRecognised("no MLP of two or three linears and a known activation")


def _followed(call: ObservedCall, norms: Mapping[str, ObservedCall]) -> str | None:
    """The norm whose output this call read."""
    return next((name for name, norm in norms.items() if call.follows(norm)), None)


def _following(call: ObservedCall, norms: Mapping[str, ObservedCall]) -> str | None:
    """The norm that read this call's output."""
    return next((name for name, norm in norms.items() if norm.follows(call)), None)


def _ratio(tensor: Tensor, of: Tensor, what: str) -> float:
    """The number by which one tensor is the other's multiple. Raises NotRecognised if there is no such number."""
    ratio = float((tensor.double() * of.double()).sum() / of.double().square().sum())
    if distance(of * ratio, tensor) > SAME:
        raise NotRecognised(f"{what} is another sum than a row has")
    return float(f"{ratio:.5g}")  # the same in all layers, whatever their rounding


def _names(layer: LayerRoles) -> list[str]:
    norms = (layer.norm1, layer.norm2, layer.attn_out_norm, layer.mlp_out_norm, layer.q_norm, layer.k_norm)
    return [name for name in norms if name]


def _one_kind(norms: Sequence[nn.Module]) -> NormKind:
    kinds = {norm_kind(norm) for norm in norms}
    if None in kinds or len(kinds) != 1:
        raise NotRecognised("norms of several kinds, or of a kind that no row has")
    kind = kinds.pop()
    assert kind is not None
    return kind


def _logits(logits: Tensor, head: Tensor, config: Any) -> tuple[str, float]:
    if distance(head, logits) <= SAME:
        return "as they are", 1.0
    cap = getattr(config, "final_logit_softcapping", None)
    if cap and distance(torch.tanh(head / cap) * cap, logits) <= SAME:
        return "capped", float(cap)
    return "scaled", _ratio(logits, head, "the logits")
