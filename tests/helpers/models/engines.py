"""Vanilla and fused forms of the small models, made once per session, and prompts for them."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from helpers.models.small_models import SMALL_CONFIGS, VOCAB, small_model
from helpers.sweeps import swept
from torch import Tensor
from transformers import PreTrainedModel

import labkit
from labkit.engine import InferenceEngine
from labkit.engine.hf.causal_lm import FusedCausalLM
from labkit.engine.memory.kv_cache import KVCache
from labkit.engine.runners.step import StepInput
from labkit.models.policies import model_config_of
from labkit.stages import parse

IMPLS = ("cpp", "reference")
# all kinds of positions, windows and norms
FEW = ("gpt2", "gptj", "gpt-neo", "bloom", "opt-post-norm", "llama", "mistral")
few_models = pytest.mark.parametrize("name", swept(list(SMALL_CONFIGS), FEW))  # `make test-all` tests all models


def distance(actual: Tensor, expected: Tensor) -> float:
    """Root of the mean square difference, relative to the standard deviation of the expected tensor."""
    return float((actual.float() - expected.float()).square().mean().sqrt() / expected.float().std())


@cache
def vanilla(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return small_model(name, dtype=dtype)


@cache
def fused(name: str, impl: str = "cpp", dtype: torch.dtype = torch.float32) -> InferenceEngine:
    return labkit.init_inference(vanilla(name), impl=impl, dtype=dtype)


@cache
def shallow(name: str, layers: int) -> PreTrainedModel:
    """`vanilla(name)` with fewer layers, so that Triton's interpreter runs it in a second."""
    kinds: dict[str, Any] = {"attention_types": [[["global", "local"], layers // 2]]} if name == "gpt-neo" else {}
    return small_model(name, num_hidden_layers=layers, **kinds)


@cache
def windowed(name: str) -> bool:
    """Whether some layer sees only the last few tokens. The window counts padding, as in vanilla models."""
    config = vanilla(name).config
    return any(model_config_of(config).windows)


WHOLE = [name for name in SMALL_CONFIGS if not windowed(name)]


def prompt(batch: int, tokens: int, seed: int = 0) -> Tensor:
    """Token ids [batch, tokens] without 0, which is the padding token."""
    return torch.randint(1, VOCAB, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def greedy(model: PreTrainedModel | InferenceEngine, ids: Tensor, new: int, **options: object) -> Any:
    """Result of `generate` with greedy search for `new` tokens."""
    return model.generate(ids, do_sample=False, max_new_tokens=new, pad_token_id=0, **options)


def result(model: FusedCausalLM, tokens: Tensor, cache: KVCache, **options: Any) -> Tensor:
    """Result of one step: logits, or tokens with `greedy`."""
    output = model.runner.begin(StepInput(tokens, cache, **options)).collect().result
    assert output is not None
    return output


def greedy_steps(model: FusedCausalLM, cache: KVCache, tokens: Tensor, steps: int) -> Tensor:
    """The tokens [B, 1], followed by `steps` greedy tokens."""
    texts = [tokens]
    for _ in range(steps):
        texts.append(result(model, texts[-1].contiguous(), cache, greedy=True, follows=True))
    return torch.cat(texts, dim=1)


def profiled(run: Callable[[], object]) -> list[str]:
    """The stage ranges that torch.profiler records, by start."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        run()
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    return [event.name for event in events if parse(event.name)]


def error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference relative to the range of the expected tensor; a NaN counts as infinite."""
    assert actual.shape == expected.shape
    worst = (actual - expected).abs().max() / (expected.max() - expected.min())
    return float(worst.nan_to_num(nan=float("inf")))
