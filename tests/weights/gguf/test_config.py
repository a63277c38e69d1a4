"""The model described by the metadata of a GGUF file equals transformers' model with the same config."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models.gguf_files import VOCAB, gguf_model, logits_of, write_gguf
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from labkit.engine import init_inference
from labkit.system.errors import UserError
from labkit.weights.resolve import resolve

TOKENS = torch.arange(1, 150)[None] % VOCAB
THETA = 10_000.0
LINEAR = {"rope_type": "linear", "rope_theta": THETA, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": THETA, "factor": 4.0, "original_max_position_embeddings": 48}
YARN_KEYS: dict[str, Any] = {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 48}
pytestmark = pytest.mark.usefixtures("one_thread")


def scaled(name: str, rope: dict[str, Any]) -> PreTrainedModel:
    """The small model with the same weights and another rotary scaling."""
    plain = gguf_model(name)
    config = AutoConfig.for_model(**(plain.config.to_dict() | {"rope_parameters": rope}))
    model = AutoModelForCausalLM.from_config(config).eval()
    model.load_state_dict(plain.state_dict())
    return model


def check(file: Path, model: PreTrainedModel) -> None:
    source, expected = resolve(file), logits_of(model, TOKENS)
    assert not torch.allclose(logits_of(gguf_model(model.config.model_type), TOKENS), expected, atol=0.5)
    assert torch.allclose(logits_of(source.hf_model(torch.float32), TOKENS), expected, atol=1e-4)
    assert torch.allclose(logits_of(init_inference(source), TOKENS), expected, atol=2e-4)


@pytest.mark.parametrize(
    ("name", "rope", "keys"),
    [
        ("llama", LINEAR, {"scaling.type": "linear", "scaling.factor": 4.0}),
        ("qwen2", LINEAR, {"scale_linear": 4.0}),
        ("qwen3", YARN, YARN_KEYS),
        (
            "llama",
            YARN | {"beta_fast": 6.0, "beta_slow": 2.0},
            YARN_KEYS | {"scaling.yarn_beta_fast": 6.0, "scaling.yarn_beta_slow": 2.0},
        ),
        ("qwen2", YARN | {"attention_factor": 1.5}, YARN_KEYS | {"scaling.yarn_attn_factor": 1.5}),
    ],
)
def test_the_rotation_is_scaled(name: str, rope: dict[str, Any], keys: dict[str, Any], tmp_path: Path) -> None:
    model = scaled(name, rope)
    metadata = {f"{name}.rope.{key}": value for key, value in keys.items()}
    check(write_gguf(tmp_path / "model.gguf", model, metadata=metadata), model)


def factors(rope: dict[str, Any]) -> torch.Tensor:
    """Factors that llama.cpp's converter writes for Llama 3's scaling of heads of 16."""
    config = PretrainedConfig(rope_parameters=rope, head_dim=16, max_position_embeddings=1 << 20)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    return THETA ** -(torch.arange(0, 16, 2) / 16) / frequencies


@pytest.mark.parametrize(("original", "expected"), [(8192, "llama3"), (32, "longrope")])
def test_factors_of_frequencies_become_llama_3_or_stay(original: int, expected: str, tmp_path: Path) -> None:
    """Llama 3's parameters in published files are recognised. Any other factors are used unchanged."""
    rope = {"rope_type": "llama3", "rope_theta": THETA, "factor": 32.0, "original_max_position_embeddings": original}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model, extra = scaled("llama", rope), {"rope_freqs.weight": factors(rope)}
    file = write_gguf(tmp_path / "model.gguf", model, extra=extra, metadata={"llama.context_length": 131072})
    config = resolve(file).hf_config
    assert config.rope_parameters["rope_type"] == expected
    assert expected == "longrope" or config.rope_parameters == pytest.approx(rope)
    check(file, model)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count is 8 with heads of 16"),
        ({"llama.attention.value_length": 8}, "attention.value_length is 8 with heads of 16"),
        ({"llama.rope.scaling.type": "longrope"}, "is 'longrope'; expected none, linear or yarn"),
        ({"llama.rope.scaling.alpha": 2.0}, "llama.rope.scaling.alpha is not supported"),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_beta_fast": float("nan")},
            "expected a finite number",
        ),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_ext_factor": 0.5}, "expected 1"),
        ({"llama.attention.scale": 0.5}, "llama.attention.scale, which is not supported"),
        ({"llama.expert_group_count": 8}, "llama.expert_group_count, which is not supported"),
        ({"llama.block_count": "2"}, 'block_count is "2", expected a whole number'),
        ({"llama.block_count": 2.0}, "block_count is 2.0, expected a whole number"),
        ({"llama.block_count": True}, "block_count is true, expected a whole number"),
        ({"llama.block_count": [2]}, "block_count is a list of 1, expected a whole number"),
        ({"llama.block_count": None}, "has no llama.block_count"),
        ({"llama.block_count": (1 << 32) - 1}, "num_hidden_layers = 4294967295; expected an integer from 1 to"),
        ({"llama.block_count": 400}, "missing"),
        ({"llama.embedding_length": 0}, "hidden_size = 0"),
        ({"llama.embedding_length": 32}, "is of shape"),
        ({"llama.attention.head_count": 0}, "num_attention_heads = 0"),
        ({"llama.attention.head_count": 3}, r"gguf: these fields make no llama: the hidden size \(64\) is not a"),
        ({"llama.embedding_length": 7}, r"hidden size \(7\) is not a multiple of .*; convert it again"),
        ({"llama.attention.head_count_kv": 3}, "is of shape|divide|do not fit"),
        ({"llama.attention.layer_norm_rms_epsilon": "x"}, 'rms_epsilon is "x", expected a finite number'),
        ({"llama.vocab_size": 100}, r"token_embd.weight is of shape \[288, 64\], expected 100 rows"),
        ({"general.architecture": 7}, "general.architecture is 7, expected a string"),
        ({"tokenizer.ggml.eos_token_id": "x"}, 'eos_token_id is "x"'),
    ],
)
def test_metadata_that_describes_no_model_is_said(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        init_inference(resolve(write_gguf(tmp_path / "model.gguf", gguf_model("llama"), metadata=metadata)))


def test_factors_that_are_no_frequencies_are_said(tmp_path: Path) -> None:
    for factors_tensor, message in (
        (torch.ones(4), r"is F32 \[4\], expected F32 \[8\]"),
        (torch.zeros(8), "holds 0.0"),
    ):
        file = write_gguf(tmp_path / "model.gguf", gguf_model("llama"), extra={"rope_freqs.weight": factors_tensor})
        with pytest.raises(UserError, match=message):
            resolve(file)
