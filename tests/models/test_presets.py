"""Published shapes by name."""

import pytest
import torch

from labkit.models.policies import model_config_of, policy_for
from labkit.models.presets import PRESETS, find_preset
from labkit.weights.source import RandomWeights

# Parameters of the published checkpoints; a tied head counts once.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt-j-6b": 6_050_882_784,
    "gpt-neo-125m": 125_198_592,
    "gpt-neo-1.3b": 1_315_575_808,
    "gpt-neo-2.7b": 2_651_307_520,
    "gpt-neox-20b": 20_554_567_680,
    "pythia-410m": 405_334_016,
    "bloom-560m": 559_214_592,
    "bloom-7b1": 7_069_016_064,
    "bloom-176b": 176_247_271_424,
    "opt-125m": 125_239_296,
    "opt-350m": 331_196_416,
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "tinyllama-1.1b": 1_100_048_384,
    "mistral-7b": 7_241_732_096,
    "qwen2-0.5b": 494_032_768,
    "qwen3-0.6b": 596_049_920,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes_have_the_published_number_of_parameters(name: str) -> None:
    hf_config = PRESETS[name].hf_config
    assert model_config_of(hf_config).weight_bytes(torch.int8) == PUBLISHED[name]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_model_that_the_policies_know(name: str) -> None:
    hf_config = PRESETS[name].hf_config
    policy = policy_for(hf_config)
    policy.check(policy.model_config(hf_config), RandomWeights(hf_config, 0).names())


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("gptj-6b", "gpt-j-6b"),
        ("EleutherAI/gpt-j-6B", "gpt-j-6b"),
        ("eleutherai/gpt-j-6b", "gpt-j-6b"),
        ("GPT2_XL", "gpt2-xl"),
        ("openai-community/gpt2", "gpt2"),
        ("Llama-2-7b-hf", "llama-2-7b"),
        ("mistralai/Mistral-7B-v0.1", "mistral-7b"),
        ("bigscience/bloom", "bloom-176b"),
    ],
)
def test_obvious_spellings_find_their_preset(spelling: str, name: str) -> None:
    preset = find_preset(spelling)
    assert preset
    assert preset.name == name
