"""The part of a derived row that describes a layer's MLP or mixture: its names, and the numbers of a mixture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from labkit.models.config import ExpertsSpec
from labkit.models.derived.head_linears import NotRecognised
from labkit.models.derived.mixtures import MixtureRole
from labkit.models.derived.small_config import EXPERTS_CHOSEN
from labkit.models.expert_names import ExpertNames
from labkit.models.hf_config import Fields
from labkit.models.observed.calls import matrix
from labkit.models.observed.mlps import PlainMlp

WEIGHT = ".weight"


def names_of_half(role: PlainMlp | MixtureRole, dense: PlainMlp | None, model: PreTrainedModel) -> dict[str, Any]:
    """The fields of a row with the names of an MLP, or of a mixture. dense: the MLP of layers without a mixture."""
    if isinstance(role, PlainMlp):
        return {"ff1": _first(role), "ff2": role.down}
    names: dict[str, Any] = {"ff1": (role.experts,), "ff2": role.experts, "router": role.router}
    names |= {"choice_bias": role.choice_bias, "choice_bias_shape": role.choice_bias_shape, **_stored(role, model)}
    if dense is not None:
        names |= {"dense_ff1": _first(dense), "dense_ff2": dense.down}
    if role.shared is not None:
        names |= {"shared_ff1": _first(role.shared), "shared_ff2": role.shared.down, "shared_gate": role.shared_gate}
    return names


def _first(mlp: PlainMlp) -> tuple[str, ...]:
    if mlp.halves and not mlp.gate_first:
        raise NotRecognised("one matrix of the MLP holds up rows, then gate rows")
    return (mlp.gate, mlp.up) if mlp.gate else (mlp.up,)


def _stored(role: MixtureRole, model: PreTrainedModel) -> dict[str, Any]:
    """The names of experts in a checkpoint, as transformers converts them when it loads one."""
    kinds = (type(model).__name__, model.config.model_type)
    conversions: list[Any] = next(filter(None, map(get_checkpoint_conversion_mapping, kinds)), [])
    sources: dict[str, list[str]] = {}
    renamed = []
    for conversion in conversions:
        target = conversion.target_patterns[0]
        if not hasattr(conversion, "operations"):
            old = conversion.source_patterns[0].replace("\\.", ".")
            renamed.append((old.removeprefix("."), target.removeprefix(".")))
            continue
        for stack in role.stacks:
            if stack.endswith(target):
                begin = stack.removesuffix(target)
                sources[stack] = [begin + each.replace("*", "{}") for each in conversion.source_patterns]
    first, second = (sources.get(stack, []) for stack in role.stacks)
    names = ExpertNames(role.stacks, apart=((), f"{role.experts}.{{}}"))
    if len(first) == 1 + role.gated and len(second) == 1 and all(name.endswith(WEIGHT) for name in first + second):
        modules = [name.removesuffix(WEIGHT) for name in first + second]
        names = replace(names, apart=(tuple(modules[:-1]), modules[-1]))
    return {"experts": names, "renamed_in_layer": tuple(renamed)}


def dense_fields(dense: PlainMlp | None, experts: str, layers: Sequence[nn.Module]) -> Fields:
    """The fields of a config that say which layers have an MLP instead of experts. experts: the path of experts in the
    layers that have them.

    Raises NotRecognised for layers without experts whose MLP the small model did not show.
    """
    lacking = [experts not in dict(layer.named_modules()) for layer in layers]
    if not any(lacking):
        return {}
    if dense is None:
        raise NotRecognised("layers without experts, of which the small model has none")
    size = matrix(layers[lacking.index(True)].get_submodule(dense.down)).shape[1]
    return {"dense_layers": tuple(lacking), "dense_size": size}


def experts_of(
    role: MixtureRole, layer: nn.Module, small: PretrainedConfig, config: PretrainedConfig, factor: float
) -> ExpertsSpec:
    """The mixture of a model of this config. layer: one that has it. small: the config of the recognised model.

    Raises NotRecognised unless one field of both configs has the number of experts that a row passes.
    """
    parameters = dict(layer.get_submodule(role.experts).named_parameters())
    numbers = {vars(config.get_text_config())[name] for name in names_of_chosen(small, role.chosen)}
    if len(numbers) != 1:
        raise NotRecognised(f"{role.chosen} experts for each row, a number that no single field of the config has")
    shared: Any = None if role.shared is None else layer.get_submodule(role.shared.down)
    return ExpertsSpec(
        len(parameters[role.first]),
        numbers.pop(),
        role.renormalised,
        shared=0 if shared is None else shared.weight.shape[1],
        shared_gate=bool(role.shared_gate),
        scores=role.scores,
        choice_bias=bool(role.choice_bias),
        factor=factor,
    )


def names_of_chosen(config: PretrainedConfig, chosen: int) -> list[str]:
    """The fields of a config with the number of experts that a row passes."""
    fields = vars(config.get_text_config())
    return [name for name in EXPERTS_CHOSEN if type(fields.get(name)) is int and fields[name] == chosen]
