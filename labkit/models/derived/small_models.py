"""Small random models of an architecture's own class, in which each weight matters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from labkit.models.derived.head_linears import NotRecognised
from labkit.models.tensor_names import stored_buffers
from labkit.system.errors import UserError, first_line

MOST_NUMBERS = 1 << 26  # parameters of a small model


@contextmanager
def errors_of_the_class() -> Iterator[None]:
    """Turns other errors than UserError into NotRecognised: a class may raise anything for a small config."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = first_line(error)
        raise NotRecognised(f"{type(error).__name__} in transformers' small model: {reason}") from error


def causal_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """The class of transformers for causal models of this config. ValueError: transformers has none."""
    known = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return known if isinstance(known, type) else type(without_memory(config))


def small_model(
    config: PretrainedConfig, kind: type[PreTrainedModel] | None = None, *, seed: int = 0
) -> PreTrainedModel:
    """A model with random weights, none of them trivial: a forgotten bias or norm shows. Raises NotRecognised if it is
    not small: a stranger's config may have sizes that no rule knows.
    """
    numbers = sum(parameter.numel() for parameter in without_memory(config, kind).parameters())
    if numbers > MOST_NUMBERS:
        raise NotRecognised(
            f"its small model has {numbers / 1e6:,.0f} million parameters; some size has an unknown name"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _made(config, kind, dtype=torch.float32)
        randomised(model)
    return model


def randomised(model: nn.Module, scale: float = 1.0) -> None:
    """Draws all parameters anew, in place, and changes stored buffers. scale: of the embedding's rows."""
    for buffer in stored_buffers(model).values():
        buffer.add_(torch.randn(buffer.shape) / 4)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape)
        if parameter.dim() > 1:
            noise = noise * scale if "embed" in name else noise / parameter.shape[-1] ** 0.5
        elif name.endswith("bias"):
            noise = noise / 4
        else:
            noise = 1 + noise / 4
        parameter.data = noise.to(parameter.dtype)


def without_memory(config: PretrainedConfig, kind: type[PreTrainedModel] | None = None) -> PreTrainedModel:
    """A model of this config whose tensors have no memory. kind: its class; None: the causal one of the config."""
    with torch.device("meta"):
        return _made(config, kind)


def _made(config: PretrainedConfig, kind: type[PreTrainedModel] | None, **settings: Any) -> PreTrainedModel:
    if kind is not None:
        return kind._from_config(config, **settings).eval()
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=False, **settings)
    return model.eval()
