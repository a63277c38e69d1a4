"""What `init_inference` is asked for: a model of a known architecture, where its tensors are, and the options."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from labkit.engine.alterations import refuse_alterations
from labkit.engine.checkpoints import as_saved
from labkit.engine.hf.encoder_refusals import refuse_what_encoders_lack
from labkit.engine.options import Options
from labkit.models.config import ModelConfig
from labkit.models.encoder_policies import ENCODERS, encoder_policy_for
from labkit.models.policies import policy_for
from labkit.models.policy import Policy
from labkit.system.errors import UserTypeError
from labkit.weights.checkpoint.described import described_source
from labkit.weights.model_tensors import ModelTensors
from labkit.weights.protocol import TensorSource, has_own_head

TOKEN_IDS = ("eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id")


@dataclass(frozen=True)
class Request:
    """What is asked for: a model of a known architecture, where its tensors come from, and the options.

    generation_config: the given model's; None where none was given with it.
    """

    model: Any
    hf_config: PretrainedConfig
    policy: Policy
    config: ModelConfig
    source: TensorSource
    options: Options
    generation_config: GenerationConfig | None

    @property
    def is_encoder(self) -> bool:
        return not self.config.causal


def hf_config_of(model: Any, options: Options) -> PretrainedConfig:
    """The config of whatever was given as a model. Raises TypeError for anything else."""
    if isinstance(model, PretrainedConfig) and options.checkpoint is not None:
        return model
    holds_tensors = isinstance(model, PreTrainedModel) or all(hasattr(model, name) for name in ("names", "get"))
    found = getattr(model, "hf_config", None) or getattr(model, "config", None)
    if not (holds_tensors and isinstance(found, PretrainedConfig)):  # an engine has a config too
        raise UserTypeError(
            f"model: expected a transformers model or a labkit ModelSource, got {type(model).__name__}; of one that "
            "torch.compile, DistributedDataParallel or peft has wrapped, pass the model inside (of peft: "
            "model.merge_and_unload())"
        )
    return found


def resolve(model: Any, options: Options, hf_config: PretrainedConfig) -> Request:
    """The model's row among the policies, and where its tensors are. Raises UserError for a model that was changed in
    more than its weights; one with a head of its own keeps it, whatever its config says.
    """
    encoder = encoder_policy_for(model)
    policy = encoder or policy_for(hf_config, also=ENCODERS)
    if encoder:
        refuse_what_encoders_lack(options, policy.architecture)
    source: TensorSource = model
    if options.checkpoint is not None:
        source = described_source(options.checkpoint, hf_config, options.base_dir)
    elif isinstance(model, PreTrainedModel):
        source = ModelTensors(model.base_model, f"{policy.layers}.") if encoder else ModelTensors(model)
    config, generation_config = policy.model_config(hf_config), _generation_config(model)
    policy.check(config, source.names())
    if isinstance(model, PreTrainedModel):
        refuse_alterations(model, policy, config)
    if config.tied_head and isinstance(source, ModelTensors) and has_own_head(policy, source):
        hf_config, config = copy.deepcopy(hf_config), replace(config, tied_head=False)
        hf_config.tie_word_embeddings = False
    return Request(model, hf_config, policy, config, source, as_saved(options, source), generation_config)


def _generation_config(model: Any) -> GenerationConfig | None:
    """A copy of the model's, whose token ids are Python's integers, as JSON and ranks want them; None: it has none."""
    given = getattr(model, "generation_config", None)
    if given is None:
        return None
    config = copy.deepcopy(given)
    for name in TOKEN_IDS:
        value = getattr(config, name, None)
        if isinstance(value, list | tuple):
            setattr(config, name, [_plain(item) for item in value])
        else:
            setattr(config, name, _plain(value))
    return config


def _plain(value: Any) -> Any:
    """A tensor, an array or a number of numpy as Python has it."""
    return value.tolist() if hasattr(value, "tolist") else value
