"""The row of an architecture, made of the roles that were read from a small model of it."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from labkit.models.config import RotarySpec
from labkit.models.derived.mixture_rows import dense_fields, experts_of, names_of_chosen, names_of_half
from labkit.models.derived.mixtures import MixtureRole
from labkit.models.derived.recognise import ModelRoles, NotRecognised, kinds_of_layers, near, recognise
from labkit.models.derived.rotations import short_positions
from labkit.models.derived.small_config import small_config
from labkit.models.derived.small_models import causal_class, errors_of_the_class, small_model, without_memory
from labkit.models.hf_config import Fields
from labkit.models.observed.calls import matrix
from labkit.models.observed.mlps import PlainMlp
from labkit.models.policy import Policy

OTHER = 1.25  # factor that changes a field of a config, to see whether a number follows it


class DerivedRow:
    """What was read from a small model of an architecture.

    small: the model, with random weights.
    """

    def __init__(
        self,
        hf_config: PretrainedConfig,
        kind: type[PreTrainedModel] | None = None,
        roles: ModelRoles | None = None,
    ) -> None:
        """kind: the class; None: the causal one of the config. roles: that were read before; None: they are read now.

        Raises NotRecognised for a model that no row describes, and for a class that fails on its small config.
        """
        self._hf_config = hf_config
        with errors_of_the_class():
            self._kind = kind or causal_class(hf_config)
            self._config = _with_every_kind(hf_config, self._kind)
            self.roles = recognise(self.small) if roles is None else roles

    @cached_property
    def small(self) -> PreTrainedModel:
        with errors_of_the_class():
            return small_model(self._config, self._kind)

    def with_every_layer(self) -> PreTrainedModel:
        """A small model with as many layers as the config has."""
        with errors_of_the_class():
            return small_model(small_config(self._hf_config, every_layer=True), self._kind)

    def with_other_choices(self) -> PreTrainedModel | None:
        """A small model whose rows pass another number of experts; None: it has no mixture."""
        if not isinstance(role := self.roles.layer.mlp, MixtureRole) or role.count == 1:
            return None
        other = role.chosen + 1 if role.chosen < role.count else role.chosen - 1
        config = copy.deepcopy(self._config)
        for name in names_of_chosen(config, role.chosen):
            setattr(config.get_text_config(), name, other)
        with errors_of_the_class():
            return small_model(config, self._kind)

    def policy_for(self, model: PreTrainedModel) -> Policy:
        """The row of a model of the same architecture and switches, which may be on the meta device."""
        roles, layer = self.roles, self.roles.layer
        fields = self._fields(model)
        first = model.get_submodule(f"{roles.layers}.0.{layer.attn_out}")
        return Policy(
            architecture=type(model).__name__,
            model_type=model.config.model_type,
            read=lambda hf_config: fields,
            layers=roles.layers,
            norm1=layer.norm1 or "",
            qkv=layer.qkv,
            attn_out=layer.attn_out,
            sinks=self._sinks and f"{layer.attention}.{self._sinks}",
            norm2=layer.norm2,
            **names_of_half(layer.mlp, roles.dense, model),
            tokens=roles.tokens,
            positions=roles.positions,
            embed_norm=roles.embed_norm,
            final_norm=roles.final_norm,
            head=roles.head,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            attn_out_norm=layer.attn_out_norm,
            mlp_out_norm=layer.mlp_out_norm,
            transposed=isinstance(first, Conv1D),
            interleaved_qkv=layer.interleaved_qkv,
            positions_from_mask=roles.positions_from_mask,
            takes_position_ids="position_ids" in inspect.signature(type(model).forward).parameters,
            unread=layer.unread,
            ignored=tuple(type(model)._keys_to_ignore_on_load_unexpected or ()),
            filled=self._filled(),
        )

    def _filled(self) -> tuple[tuple[str, float], ...]:
        """Tensors that the kernels read and the class does not have, and their number."""
        roles = self.roles
        norms = () if roles.norm.weights else (*roles.layer.norms, roles.final_norm, roles.embed_norm)
        ones = [(f"{name}.weight", 1.0) for name in norms if name]
        return (*ones, *((f"{name}.bias", 0.0) for name in roles.layer.without_bias))

    def _fields(self, model: PreTrainedModel) -> Fields:
        roles, layer, config = self.roles, self.roles.layer, model.config.get_text_config()
        layers: Any = model.get_submodule(roles.layers)
        embedding: Any = model.get_submodule(roles.tokens)
        first = {name: matrix(layers[0].get_submodule(name)) for name in (*layer.qkv, layer.attn_out)}
        hidden = embedding.weight.shape[1]
        attention = [each.get_submodule(layer.attention) for each in layers]
        head_dim = getattr(attention[0], "head_dim", None) or hidden // config.num_attention_heads
        heads = first[layer.attn_out].shape[1] // head_dim
        kv_heads = (sum(len(first[name]) for name in layer.qkv) // head_dim - heads) // 2
        head: Any = model.get_submodule(roles.head)
        positions = None
        if roles.positions is not None:
            table: Any = model.get_submodule(roles.positions)
            positions = len(table.weight) - roles.position_offset
        kind, number = roles.logits
        alibi = roles.attention[0].alibi
        if alibi and heads & (heads - 1):
            raise NotRecognised(f"ALiBi with {heads} heads, for which libraries have several series of slopes")
        return {
            "hidden_size": hidden,
            "num_layers": len(layers),
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": head_dim,
            "vocab_size": len(head.weight),
            "embedding_size": hidden,
            "max_positions": None if alibi else positions or config.max_position_embeddings,
            "norm": roles.norm.kind,
            "norm_eps": roles.norm.eps,
            "norm_offset": roles.norm.offset,
            "norm_bias": roles.norm.bias,
            **self._second_half(layers, config, hidden),
            "position": "alibi" if alibi else "learned" if roles.positions else "rotary",
            "position_offset": roles.position_offset,
            **self._rotaries(model, config),
            "attention_scales": tuple(self._scales(attention, config, head_dim)),
            "windows": tuple(self._windows(attention, config)),
            "biases": layer.biases | (frozenset({"head"}) if head.bias is not None else frozenset()),
            "parallel_residual": layer.parallel,
            "shared_norm": layer.norm1 is not None and layer.norm2 is None,
            "final_norm": roles.final_norm is not None,
            "embedding_norm": roles.embed_norm is not None,
            "positions_after_norm": roles.positions_after_norm,
            "input_norms": layer.norm1 is not None,
            "pre_norm": layer.pre_norm,
            "qk_norm": layer.q_norm is not None,
            "qk_norm_whole": layer.norms_whole,
            "output_norms": layer.attn_out_norm is not None,
            "embedding_scale": self._transferred(lambda read: read.embedding_scale, config, hidden),
            "residual_scale": self._transferred(lambda read: read.layer.residual_scale, config, hidden),
            "attention_cap": self._cap(),
            "attention_sinks": bool(self._sinks),
            "logit_cap": number if kind == "capped" else None,
            "logit_scale": self._transferred(lambda read: read.logits[1], config, hidden) if kind == "scaled" else 1.0,
            "tied_head": head.weight is embedding.weight,
        }

    def _second_half(self, layers: Sequence[nn.Module], config: PretrainedConfig, hidden: int) -> Fields:
        mlp = self.roles.layer.mlp
        common = {"activation": mlp.activation, "gated": mlp.gated}
        if isinstance(mlp, PlainMlp):
            return common | {"intermediate_size": matrix(layers[0].get_submodule(mlp.down)).shape[1]}
        common |= dense_fields(self.roles.dense, mlp.experts, layers)
        layer = next(layer for layer in layers if mlp.experts in dict(layer.named_modules()))
        experts = experts_of(mlp, layer, self._config, config, self._transferred(_factor, config, hidden))
        return common | {"intermediate_size": layer.get_parameter(mlp.stacks[1]).shape[-1], "experts": experts}

    def _rotaries(self, model: PreTrainedModel, config: Any) -> Fields:
        """The rotations of the layers. One without a rotation has angles of 0."""
        if self.roles.positions is not None or self.roles.attention[0].alibi:
            return {}
        layers: Any = model.get_submodule(self.roles.layers)
        of_layers = self._per_layer(self.roles.rotations, config, len(layers), "rotations")
        specs = {turn: turn.specs(model, config) for turn in dict.fromkeys(of_layers) if turn is not None}
        tables = [*specs.values()]
        if None in of_layers:
            first = tables[0][0] if tables else RotarySpec(2, interleaved=False, inv_freq=(0.0,))
            tables.append((replace(first, inv_freq=(0.0,) * len(first.inv_freq), attention_scaling=1.0),) * 2)
        short, long = zip(*tables, strict=True)
        numbers = {turn: number for number, turn in enumerate([*specs, *([None] if None in of_layers else [])])}
        per_layer = tuple(numbers[turn] for turn in of_layers) if len(tables) > 1 else ()
        fields: Fields = {"rotary": short[0], "other_rotaries": short[1:], "rotary_tables": per_layer}
        return fields if short == long else fields | {"long_rotaries": long, "short_positions": short_positions(config)}

    def _per_layer(self, seen: Sequence[Any], config: Any, count: int, what: str) -> list[Any]:
        """What was seen in each layer of the small model, for the `count` layers of a model of this config: the same in
        all of them, or decided by a list of the config.
        """
        if len(set(seen)) == 1:
            return [seen[0]] * count
        small = self._config.get_text_config()
        for name, entries in vars(small).items():
            if isinstance(entries, list | tuple) and len(entries) == len(seen):
                decides = dict(zip(map(repr, entries), seen, strict=True))
                own = [repr(entry) for entry in getattr(config, name) or ()]
                consistent = all(decides[repr(entry)] == value for entry, value in zip(entries, seen, strict=True))
                if consistent and len(own) == count and set(own) <= set(decides):
                    return [decides[entry] for entry in own]
        raise NotRecognised(f"{what} of which nothing in the config says which layers have them")

    def _cap(self) -> float | None:
        caps = {attention.cap for attention in self.roles.attention}
        if len(caps) != 1:
            raise NotRecognised("caps of scores that differ from layer to layer")
        return caps.pop()

    @cached_property
    def _sinks(self) -> str:
        """The parameter of the attention's module with the sinks of its heads; "" without sinks."""
        sinks = {(attention.sinks, attention.cap if attention.sinks else None) for attention in self.roles.attention}
        if len(sinks) != 1:
            raise NotRecognised("attention sinks in some layers only")
        name, cap = sinks.pop()
        if name and cap is not None:
            raise NotRecognised("attention sinks beside capped scores")
        return name

    def _scales(self, attention: Sequence[nn.Module], config: Any, head_dim: int) -> Iterator[float]:
        """The scale of each layer's scores."""
        small = self.roles.attention[0]
        for module in attention:
            if small.own_scale:
                yield float(module.scaling)  # type: ignore[arg-type]
            elif near(small.scale, small.head_dim**-0.5):
                yield head_dim**-0.5
            else:
                yield self._transferred(lambda read: read.attention[0].scale, config, head_dim)

    def _windows(self, attention: Sequence[nn.Module], config: Any) -> list[int | None]:
        """The window of each layer; None: it has none."""
        small = self.roles.attention
        if all(role.own_window for role in small):
            return [getattr(module, "sliding_window", None) for module in attention]
        have = self._per_layer([role.window is not None for role in small], config, len(attention), "windows")
        return [getattr(config, "sliding_window", None) if has else None for has in have]

    def _transferred(self, number_in: Callable[[ModelRoles], float], config: Any, size: int) -> float:
        """A constant of the small model in a model of this config: it has to be 1, the root of the hidden size, a field
        of the config or the reciprocal of one.
        """
        number, small = number_in(self.roles), self._config.get_text_config()
        if number == 1.0:
            return 1.0
        of_fields: dict[str, float] = {}  # the number in the large model if it comes from a field, by the field's name
        for name, value in vars(small).items():
            if isinstance(value, int | float) and not isinstance(value, bool) and value:
                own = getattr(config, name)
                if near(number, value):
                    of_fields[name] = float(own)
                elif near(number, 1 / value):
                    of_fields[name] = 1 / own
        numbers = set(of_fields.values()) | ({math.sqrt(size)} if near(number, math.sqrt(self.roles.width)) else set())
        if len(numbers) > 1:
            numbers = {own for name, own in of_fields.items() if self._decides(name, number_in)}
        if len(numbers) != 1:
            why = "several of the config's numbers may be" if of_fields else "is none of the config's"
            raise NotRecognised(f"the number {number:.6g}, which {why}")
        return numbers.pop()

    def _decides(self, name: str, number_in: Callable[[ModelRoles], float]) -> bool:
        """Whether a number of the small model changes with a field of its config that is no size."""
        config = copy.deepcopy(self._config)
        text = config.get_text_config()
        if not isinstance(value := getattr(text, name), float):
            return False
        setattr(text, name, value * OTHER)
        with errors_of_the_class():
            changed, number = number_in(recognise(small_model(config, self._kind))), number_in(self.roles)
        return near(changed, number * OTHER) or near(changed, number / OTHER)


def _with_every_kind(config: PretrainedConfig, kind: type[PreTrainedModel]) -> PretrainedConfig:
    """The small config with few layers, or with all of them if few are not of every kind that the large model has: the
    numbers of layers without experts may be large ones.
    """
    few, all_layers = small_config(config), small_config(config, every_layer=True)
    kinds = kinds_of_layers(without_memory(all_layers, kind))
    return few if len(kinds) < 2 or kinds_of_layers(without_memory(few, kind)) == kinds else all_layers


def _factor(roles: ModelRoles) -> float:
    mixture = roles.layer.mlp
    if not isinstance(mixture, MixtureRole):
        raise NotRecognised("a mixture that comes and goes with a number of the config")
    return mixture.factor


@dataclass(frozen=True)
class ConfigByContent:
    """A config as a key: two configs of the same content are one."""

    content: str
    config: PretrainedConfig = field(compare=False)

    @classmethod
    def of(cls, config: PretrainedConfig) -> ConfigByContent:
        """Raises NotRecognised for a config that cannot be written as JSON."""
        with errors_of_the_class():
            return cls(f"{type(config).__name__} {config.to_json_string(use_diff=False)}", config)


@lru_cache(maxsize=16)
def _derived(key: ConfigByContent) -> Policy:
    with errors_of_the_class():
        return DerivedRow(key.config).policy_for(without_memory(key.config))


def derived_policy(hf_config: PretrainedConfig) -> Policy:
    """The row of a model of this config, read from its class. It is a proposal: `labkit.engine.proof` proves it.

    Raises NotRecognised as `DerivedRow` does.
    """
    return _derived(ConfigByContent.of(hf_config))
