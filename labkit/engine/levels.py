"""Which level a model gets, what was recognised in it, and why it gets no higher level."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from labkit.engine.init_inference import engine_with_row
from labkit.engine.injected.inject import inject
from labkit.engine.proof import derive
from labkit.kernels.build import unavailable
from labkit.models.config import ModelConfig
from labkit.models.derived.row import ConfigByContent
from labkit.models.derived.small_config import small_config
from labkit.models.derived.small_models import small_model
from labkit.models.level_names import DERIVED, HOOKS, ROW
from labkit.models.policies import find_policy
from labkit.system.errors import UserError, first_line
from labkit.system.progress import Progress, unheard
from labkit.weights.quantise import Quantization

NONE = "none"  # of the levels
CLASSES: dict[str, str] = {  # of causal language models, by model type; of several names the first
    kind: names if isinstance(names, str) else names[0] for kind, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
}
SCALES = ("embedding_scale", "residual_scale", "logit_scale")
CAPS = ("attention_cap", "logit_cap")


@dataclass(frozen=True)
class Level:
    """How much of the models of a config runs on labkit's kernels.

    level: "row", "derived row", "hooks" or "none". why: it is no higher one; empty for rows.
    facts: what was recognised: of rows the parts of a layer, of hooks the replacements of a small model.
    """

    model_type: str
    architecture: str
    level: str
    why: str = ""
    facts: tuple[str, ...] = ()


def level_of(model: PreTrainedModel | PretrainedConfig) -> Level:
    """The level of a small model in memory, or of the models of a config. A config's class without a row is tried on a
    small model.
    """
    hf_config = model.config if isinstance(model, PreTrainedModel) else model
    kind = hf_config.model_type
    if policy := find_policy(hf_config):
        return Level(kind, policy.architecture, ROW, facts=facts_of(policy.model_config(hf_config)))
    name = CLASSES.get(kind, type(hf_config).__name__) if model is hf_config else type(model).__name__
    derived = derive(model, engine_with_row)
    if derived.policy is not None:
        return Level(kind, name, DERIVED, facts=facts_of(derived.policy.model_config(hf_config)))
    if reason := unavailable():
        return Level(kind, name, NONE, f"{derived.refusal}; and hooks need the C++ kernels: {reason}")
    try:
        facts = _replaced_in(model) if isinstance(model, PreTrainedModel) else _replaced(ConfigByContent.of(model))
    except Exception as error:  # noqa: BLE001 - the code of a class may raise anything for a small config
        return Level(kind, name, NONE, f"{derived.refusal}; hooks: {first_line(error)}")
    return Level(kind, name, HOOKS, derived.refusal, facts)


@lru_cache(maxsize=16)
def _replaced(key: ConfigByContent) -> tuple[str, ...]:
    """What hooks replace in a small model of a config."""
    return _replaced_in(small_model(small_config(key.config)))


def _replaced_in(model: PreTrainedModel) -> tuple[str, ...]:
    return tuple(inject(model, torch.float32, Quantization()).summary())


def facts_of(config: ModelConfig) -> tuple[str, ...]:
    """The computation of a layer in words."""
    kv = "" if config.num_kv_heads == config.num_heads else f", {config.num_kv_heads} of keys and values"
    norms = f"{config.norm} norms" + (f" that add {config.norm_offset:g}" if config.norm_offset else "")
    places = [
        "before attention and MLP" if config.input_norms else "",
        "of their outputs" if config.output_norms else "",
        "of queries and keys" if config.qk_norm else "",
    ]
    windows = sum(window is not None for window in config.windows)
    rotation = f"{config.rotary.dim} of {config.head_dim} numbers" if config.rotary else ""
    facts = [
        f"{config.num_layers} layers of {config.hidden_size}, {config.num_heads} heads of {config.head_dim}{kv}",
        f"{norms} {', '.join(filter(None, places))}",
        f"{_mlp_of(config)}, {config.activation}{', gated' if config.gated else ''}",
        f"positions: {config.position}{', ' if rotation else ''}{rotation}",
        f"another rotation beyond {config.short_positions} positions" if config.short_positions else "",
        f"windows in {windows} layers" if windows else "",
        "attention sinks" if config.attention_sinks else "",
        "attention and MLP side by side" if config.parallel_residual else "",
        f"biases: {', '.join(sorted(config.biases))}" if config.biases else "",
        *(f"{name.replace('_', ' ')} {value:g}" for name in SCALES if (value := getattr(config, name)) != 1),
        *(f"{name.replace('_', ' ')} {value:g}" for name in CAPS if (value := getattr(config, name)) is not None),
    ]
    return tuple(filter(None, facts))


def _mlp_of(config: ModelConfig) -> str:
    if (experts := config.experts) is None:
        return f"MLP of {config.intermediate_size}"
    shared = f" and one of {experts.shared} for all" if experts.shared else ""
    ways = [
        "chosen by sigmoids" if experts.scores == "sigmoid" else "",
        "with a bias of the choice" if experts.choice_bias else "",
        f"with shares times {experts.factor:g}" if experts.factor != 1 else "",
    ]
    chosen, dense = " ".join(filter(None, ways)), sum(config.dense_layers)
    parts = [
        f"{experts.count} experts of {config.intermediate_size}",
        f"{experts.chosen} for each token{shared}",
        chosen,
        f"in {dense} of the layers an MLP of {config.dense_size} instead" if dense else "",
    ]
    return ", ".join(filter(None, parts))


def all_levels(progress: Progress = unheard) -> Iterator[Level]:
    """The level of every causal language model that transformers has, for a small model of each default config."""
    for number, (kind, name) in enumerate(CLASSES.items()):
        progress(number, len(CLASSES), name)
        try:
            model = small_model(small_config(CONFIG_MAPPING[kind]()))
        except Exception as error:  # noqa: BLE001 - code of a class
            yield Level(kind, name, NONE, f"its default config, made small, fails: {first_line(error)}")
            continue
        yield replace(level_of(model), model_type=kind)


def config_of_class(name: str) -> PretrainedConfig | None:
    """The default config of a class or model type of transformers, such as GraniteForCausalLM or granite; None: it has
    no such causal language model.
    """
    for kind, architecture in CLASSES.items():
        if name in (kind, architecture):
            try:
                return CONFIG_MAPPING[kind]()
            except Exception as error:
                raise UserError(f"transformers' default config of {name} fails: {first_line(error)}") from error
    return None
