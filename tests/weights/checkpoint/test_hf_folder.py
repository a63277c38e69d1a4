"""transformers reads back a checkpoint that is written tensor by tensor."""

import math
from pathlib import Path

import pytest
import torch
from helpers.models.small_models import SMALL_CONFIGS, small_model
from helpers.sweeps import swept
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from labkit.weights.checkpoint.hf_folder import write_checkpoint
from labkit.weights.resolve import resolve
from labkit.weights.source import RandomWeights, hf_shapes

FEW = ["gpt2", "llama", "bloom", "opt-post-norm", "mixtral", "qwen2-moe", "granite-moe", "gpt-oss"]
MOST = 60_000  # bytes in a file


@pytest.mark.parametrize(
    "name",
    swept(list(SMALL_CONFIGS), FEW),
)
def test_transformers_finds_every_tensor_as_it_was(name: str, tmp_path: Path) -> None:
    model = small_model(name)
    model.save_pretrained(tmp_path / "given")
    source = resolve(tmp_path / "given")
    files = write_checkpoint(source, torch.bfloat16, tmp_path / "written", shard_bytes=MOST)
    loaded, problems = AutoModelForCausalLM.from_pretrained(tmp_path / "written", output_loading_info=True)
    assert not any(problems.values())
    assert loaded.dtype == torch.bfloat16
    assert type(loaded) is type(model)
    for key, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], tensor.bfloat16()), key
    assert len(files) > 1


def test_random_weights_are_those_that_the_seed_draws_and_files_are_as_large_as_was_said(tmp_path: Path) -> None:
    source = resolve("tiny-llama", seed=3)
    assert isinstance(source.weights, RandomWeights)
    files = write_checkpoint(source, torch.float32, tmp_path, shard_bytes=MOST)
    all_names = set()
    for file in files:
        with safe_open(file, "pt") as tensors:
            names = set(tensors.keys())
            assert all(torch.equal(tensors.get_tensor(name), source.get(name)) for name in names)
            sizes = [4 * math.prod(tensors.get_slice(name).get_shape()) for name in names]
        assert sum(sizes) <= MOST or len(sizes) == 1
        all_names |= names
    assert all_names == set(hf_shapes(source.hf_config))
    assert resolve(tmp_path).names() == all_names
