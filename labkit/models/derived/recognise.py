"""Reads what a small model computes from the calls of its modules: which module has which role, and in what order.

What is read is a proposal. Whether the kernels compute the same as the model is proved afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from labkit.models.derived.attention_calls import AttentionCall, observed_attention
from labkit.models.derived.head_linears import NotRecognised
from labkit.models.derived.layer_roles import SAME, LayerRoles, Seen, norm_before, ratio
from labkit.models.derived.mixtures import MixtureRole
from labkit.models.derived.norms import NormKind, is_norm, norm_kind
from labkit.models.derived.rotations import Rotation
from labkit.models.derived.written_attention import written_attention
from labkit.models.observed.calls import ObservedCall, calls_of, distance
from labkit.models.observed.example_inputs import token_inputs
from labkit.models.observed.mlps import PlainMlp


def near(number: float, other: object) -> bool:
    """Whether a number that was seen is the other one, but for rounding."""
    return isinstance(other, int | float) and abs(number - other) <= SAME * abs(other)


@dataclass(frozen=True)
class AttentionRole:
    """What a layer's attention does with the scores of its keys.

    own_scale, own_window: the attention's module has the number as its `scaling`, or as its `sliding_window`.
    sinks: the parameter of the attention's module that has a sink for each head; "" without sinks.
    """

    head_dim: int
    scale: float
    own_scale: bool
    window: int | None
    own_window: bool
    cap: float | None
    alibi: bool
    sinks: str

    @classmethod
    def of(cls, call: AttentionCall) -> AttentionRole:
        own, dim = getattr(call.module, "scaling", None), call.query.shape[-1]
        own_window = getattr(call.module, "sliding_window", None) == call.window
        return cls(dim, call.scale, near(call.scale, own), call.window, own_window, call.cap, call.alibi, call.sinks)


@dataclass(frozen=True)
class ModelRoles:
    """The modules of a small model by role, and what is computed before and after its layers.

    layer: the roles in a layer, with a mixture of experts if any layer has one.
    dense: the MLP of layers that have no mixture, where others have one; None: the layers are of one kind.
    width: numbers in a row of the embedding.
    """

    layers: str
    layer: LayerRoles
    dense: PlainMlp | None
    rotations: tuple[Rotation | None, ...]  # of each layer
    norm: NormKind
    tokens: str
    positions: str | None
    position_offset: int
    positions_from_mask: bool
    embed_norm: str | None
    positions_after_norm: bool
    embedding_scale: float
    final_norm: str | None
    head: str
    logits: tuple[str, float]  # "as they are", "scaled" or "capped", and the number
    attention: tuple[AttentionRole, ...]  # of each layer
    width: int


def recognise(model: PreTrainedModel) -> ModelRoles:
    """The roles of a small model's modules. Raises NotRecognised with the first thing that a row cannot say."""
    modules: dict[str, nn.Module] = dict(model.named_modules())
    layers = _layers(model, modules)
    with observed_attention(model.config) as attention:
        calls = calls_of(model, modules)
    if not attention:
        with written_attention(len(token_inputs(model)["input_ids"])) as attention:
            calls = calls_of(model, modules)
    count = len(modules[layers])  # type: ignore[arg-type]
    if len(attention) != count:
        times = "once" if len(attention) == 1 else f"{len(attention)} times"
        raise NotRecognised(f"an attention function is called {times} in {count} layers, expected once in each")
    seen = Seen(modules, calls)
    found = [seen.layer(f"{layers}.{index}", call) for index, call in enumerate(attention)]
    roles, turns, attention_calls = zip(*found, strict=True)
    layer, dense = _kinds(roles)
    return _around(seen, model, layers, layer, dense, turns, attention_calls)


def _kinds(roles: Sequence[LayerRoles]) -> tuple[LayerRoles, PlainMlp | None]:
    """See `ModelRoles`. roles: of each layer."""
    first, *others = sorted(set(roles), key=lambda layer: isinstance(layer.mlp, PlainMlp))
    for other in others:
        alike = replace(other, mlp=first.mlp) == first and isinstance(first.mlp, MixtureRole)
        same_act = (other.mlp.activation, other.mlp.gated) == (first.mlp.activation, first.mlp.gated)
        if len(others) > 1 or not (alike and same_act and isinstance(other.mlp, PlainMlp)):
            raise NotRecognised("layers of several kinds")
        return first, other.mlp
    return first, None


def kinds_of_layers(model: PreTrainedModel) -> set[frozenset[str]]:
    """The kinds of layers of a model, which may be on the meta device, by the names of their tensors."""
    modules = dict(model.named_modules())
    try:
        layers: Any = modules[_layers(model, modules)]
    except NotRecognised:
        return set()
    return {frozenset(name for name, _ in layer.named_parameters()) for layer in layers}


def _layers(model: PreTrainedModel, modules: Mapping[str, nn.Module]) -> str:
    count = model.config.get_text_config().num_hidden_layers
    lists = [path for path, module in modules.items() if isinstance(module, nn.ModuleList) and len(module) == count]
    if not lists:
        raise NotRecognised(f"no list of {count} layers")
    return max(lists, key=lambda path: sum(tensor.numel() for tensor in modules[path].parameters()))


def _around(
    seen: Seen,
    model: PreTrainedModel,
    layers: str,
    layer: LayerRoles,
    dense: PlainMlp | None,
    turns: tuple[Rotation | None, ...],
    attention: tuple[AttentionCall, ...],
) -> ModelRoles:
    """The roles of the whole model, around the layers."""
    if special := sorted({name for call in attention for name in call.special}):
        raise NotRecognised(f"the attention function gets {', '.join(special)}")
    outside = {name: call for name, call in seen.calls.items() if name and not f"{name}.".startswith(f"{layers}.")}
    norms = {name: call for name, call in outside.items() if is_norm(seen.modules[name], call)}
    tables = {name: call for name, call in outside.items() if isinstance(seen.modules[name], nn.Embedding)}
    tokens = seen.path_of(model.get_input_embeddings())
    head = seen.path_of(model.get_output_embeddings())
    if tokens not in tables or head not in outside:
        raise NotRecognised("no embedding of tokens, or no linear for the logits")
    final_norm = norm_before(outside[head], norms) or _norm_again(seen, layers, outside[head], norms)
    begun = seen.calls[f"{layers}.0"].x
    positions = [name for name, call in tables.items() if name != tokens and call.y.shape[-1] == begun.shape[-1]]
    added = tables[positions[0]].y if positions else torch.zeros(())
    ends = (begun, begun - added)  # a norm of the sum, or of the rows to which positions are added
    embed_norm, first = next(
        ((name, way == 1) for name, call in norms.items() for way, end in enumerate(ends) if _same(call.y, end)),
        (None, False),
    )
    if len(positions) > 1 or len(norms) > bool(final_norm) + bool(embed_norm):
        raise NotRecognised("more embeddings or norms outside of the layers than a row has")
    token_ids, stored = tables[tokens].x, seen.weight(tokens)
    rows = stored[token_ids]
    offset, from_mask = 0, False
    if embed_norm:
        begun = norms[embed_norm].x
    if positions:
        of_tokens = added.broadcast_to(rows.shape)
        ids = _rows_in(seen.weight(positions[0]), of_tokens)
        offset, from_mask = int(ids[1, 0]), bool(ids[0, 2] == ids[1, 0])
        begun = begun if first else begun - of_tokens
    of_norms = [f"{layers}.0.{name}" for name in layer.norms] + [name for name in (final_norm, embed_norm) if name]
    return ModelRoles(
        layers=layers,
        layer=layer,
        dense=dense,
        rotations=turns,
        norm=_one_kind({seen.modules[name]: seen.calls[name].x.shape[-1] for name in of_norms}),
        tokens=tokens,
        positions=positions[0] if positions else None,
        position_offset=offset,
        positions_from_mask=from_mask,
        embed_norm=embed_norm,
        positions_after_norm=first,
        embedding_scale=ratio(begun, rows, "the input of the layers"),
        final_norm=final_norm,
        head=head,
        logits=_logits(seen.calls[""].y, outside[head].y, model.config),
        attention=tuple(map(AttentionRole.of, attention)),
        width=rows.shape[-1],
    )


def _norm_again(seen: Seen, layers: str, head: ObservedCall, norms: Mapping[str, ObservedCall]) -> str | None:
    """The norm before the head where it was called before the layers as well (nanochat)."""
    last = seen.calls[f"{layers}.{len(seen.modules[layers]) - 1}"].y  # type: ignore[arg-type]
    with torch.no_grad():
        return next((name for name in norms if distance(seen.modules[name](last), head.x) <= SAME), None)


def _same(tensor: Tensor, other: Tensor) -> bool:
    return tensor.shape == other.shape and distance(tensor, other) <= SAME


def _rows_in(table: Tensor, rows: Tensor) -> Tensor:
    """The numbers of the rows [..., H] of a table that these are."""
    same = (rows[..., None, :] == table).all(-1)
    if not bool(same.any(-1).all()):
        raise NotRecognised("positions that are no rows of a table")
    return same.int().argmax(-1)


def _one_kind(norms: Mapping[nn.Module, int]) -> NormKind:
    """The kind of these norms, whose rows have these sizes."""
    kinds = {norm_kind(norm, size) for norm, size in norms.items()}
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
    return "scaled", ratio(logits, head, "the logits")
