"""The table at the top of a notebook: its model's shape, level and origin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from IPython.display import Markdown

from labkit.notebooks.verdicts import require_text
from labkit.system.markdown import as_text, markdown_table

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from labkit.models.config import ModelConfig


def model_shape(name: str) -> Markdown:
    """The shape of a model, its level, and the origin of its weights: the numbers from which the exercises start."""
    from labkit.engine.levels import level_of
    from labkit.models.policies import known_policy
    from labkit.weights.resolve import resolve

    require_text("model", name)
    source = resolve(name, any_architecture=True)
    level, policy = level_of(source.hf_config), known_policy(source.hf_config)
    rows: dict[str, object] = {"weights": source.origin, "architecture": level.architecture, "level": level.level}
    rows |= _own_shape(source.hf_config) if policy is None else _layer_shape(policy.model_config(source.hf_config))
    return Markdown(markdown_table(("", as_text(name)), ((row, as_text(str(value))) for row, value in rows.items())))


def _layer_shape(config: ModelConfig) -> dict[str, object]:
    experts = config.experts
    mixture = {"experts": f"{experts.count} in each layer, {experts.chosen} of them for a token"} if experts else {}
    return {
        "layers": config.num_layers,
        "hidden size": f"{config.hidden_size:,}",
        "heads": f"{config.num_heads} of {config.head_dim}; {config.num_kv_heads} for keys and values",
        "MLP size": f"{config.intermediate_size:,}" + (", gated" if config.gated else ""),
        **mixture,
        "vocabulary": f"{config.vocab_size:,}; the head {'is' if config.tied_head else 'is not'} the embedding",
    }


def _own_shape(hf_config: PretrainedConfig) -> dict[str, object]:
    """What the config of a model without a row says of its shape, under the names that transformers' configs share."""
    config = hf_config.get_text_config(decoder=True)
    named = {
        "layers": "num_hidden_layers",
        "hidden size": "hidden_size",
        "heads": "num_attention_heads",
        "vocabulary": "vocab_size",
    }
    sizes = {row: getattr(config, name, None) for row, name in named.items()}
    return {row: f"{size:,}" for row, size in sizes.items() if isinstance(size, int)}
