"""A folder whose experts are in MXFP4, as GPT-OSS is published: the numbers are read exactly, and damage is named."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.models.any_models import texts
from helpers.models.small_models import VOCAB, randomised
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import labkit
from labkit.models.shards import Cut
from labkit.system.errors import UserError
from labkit.weights.checkpoint.mxfp4 import dequantised
from labkit.weights.resolve import resolve

HIDDEN, INNER, EXPERTS, LAYERS = 64, 32, 4, 2
QUANTIZATION = {"modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"], "quant_method": "mxfp4"}
STACKS = {"gate_up_proj": (2 * INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
BLOCKS = "model.layers.1.mlp.experts.down_proj_blocks"
SCALES = "model.layers.1.mlp.experts.down_proj_scales"


def config() -> GptOssConfig:
    return GptOssConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        sliding_window=5,
        eos_token_id=None,
    )


@pytest.fixture
def published(tmp_path: Path) -> tuple[Path, GptOssForCausalLM]:
    """A folder, and the model that it holds, with the numbers that transformers makes of its blocks."""
    model = randomised(GptOssForCausalLM(config()))
    generator = torch.Generator().manual_seed(0)
    stored = dict(model.state_dict())
    for layer in range(LAYERS):
        for stack, (outputs, inputs) in STACKS.items():
            name = f"model.layers.{layer}.mlp.experts.{stack}"
            blocks = torch.randint(256, (EXPERTS, outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(122, 126, blocks.shape[:-1], dtype=torch.uint8, generator=generator)
            stored.pop(name).copy_(convert_moe_packed_tensors(blocks, scales))
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, tmp_path / "model.safetensors")
    fields = config().to_dict() | {"quantization_config": QUANTIZATION, "architectures": ["GptOssForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return tmp_path, model


def test_an_engine_of_the_folder_gives_the_tokens_of_transformers(published: tuple[Path, GptOssForCausalLM]) -> None:
    folder, model = published
    engine = labkit.init_inference(folder, dtype=torch.float32)
    assert engine.level == "row"
    assert torch.equal(texts(engine), texts(model))


def test_transformers_own_model_is_filled_with_the_same_numbers(published: tuple[Path, GptOssForCausalLM]) -> None:
    folder, model = published
    filled = resolve(folder).hf_model(torch.float32).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(filled[name], tensor), name


def test_a_part_of_a_stack_is_the_part_of_its_numbers(published: tuple[Path, GptOssForCausalLM]) -> None:
    folder, model = published
    source = resolve(folder)
    for stack, shape in STACKS.items():
        name = f"model.layers.0.mlp.experts.{stack}"
        for dim, size in ((1, shape[1]), (2, shape[0])):
            cut = Cut(dim, ((3, 7), (20, size)), size)
            assert torch.equal(source.get(name, torch.float32, cut), cut(model.state_dict()[name]))


@given(st.integers(0, 254), st.binary(min_size=16, max_size=16))
def test_every_number_is_exact(scale: int, block: bytes) -> None:
    """bfloat16 has each number of the format but those beyond its largest one, which become infinite."""
    nibbles = [nibble for byte in block for nibble in (byte & 15, byte >> 4)]
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    exact = [(-1 if nibble & 8 else 1) * values[nibble & 7] * 2.0 ** (scale - 127) for nibble in nibbles]
    expected = torch.tensor(exact, dtype=torch.float64).bfloat16()
    actual = dequantised(
        torch.tensor(list(block), dtype=torch.uint8).view(1, 1, 1, 16), torch.full((1, 1, 1), scale).byte()
    )
    assert torch.equal(actual.flatten(), expected)
    assert torch.equal(
        expected.double().clamp(-1e39, 1e39)[expected.isfinite()], torch.tensor(exact).double()[expected.isfinite()]
    )


def test_a_scale_of_255_stands_for_nan() -> None:
    block = torch.ones(1, 1, 1, 16, dtype=torch.uint8)
    assert dequantised(block, torch.full((1, 1, 1), 255).byte()).isnan().all()


Damage = Callable[[dict[str, Tensor]], object]
DAMAGES: dict[str, tuple[Damage, str]] = {
    "blocks of another size": (
        lambda tensors: tensors.update({BLOCKS: tensors[BLOCKS][..., :12].contiguous()}),
        r"down_proj_blocks has shape \[4, 64, 1, 12\] and .*down_proj_scales \[4, 64, 1\]; expected blocks",
    ),
    "too few scales": (
        lambda tensors: tensors.update({SCALES: tensors[SCALES][:, :63].contiguous()}),
        r"down_proj_blocks has shape \[4, 64, 1, 16\] and .*down_proj_scales \[4, 63, 1\]; expected blocks",
    ),
    "an expert less": (
        lambda tensors: tensors.update({name: tensors[name][:3].contiguous() for name in (BLOCKS, SCALES)}),
        r"down_proj gives ff2.weight of shape \[192, 32\], expected \[256, 32\]",
    ),
    "scales of floats": (
        lambda tensors: tensors.update({SCALES: tensors[SCALES].float()}),
        r"down_proj_scales is stored as torch.float32 in .*model.safetensors; expected bytes",
    ),
    "a scale that is no number": (
        lambda tensors: tensors[SCALES][2, 5].fill_(255),
        r"down_proj holds values that are not finite",
    ),
    "no scales": (
        lambda tensors: tensors.pop(SCALES),
        r"1 missing: model.layers.1.mlp.experts.down_proj; 1 extra: .*down_proj_blocks",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named(damage: str, published: tuple[Path, GptOssForCausalLM]) -> None:
    folder, _ = published
    change, message = DAMAGES[damage]
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=re.compile(message, re.DOTALL)):
        labkit.init_inference(folder, dtype=torch.float32)
