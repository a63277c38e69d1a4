"""Checkpoints described in the way of DeepSpeed give every rank the original model."""

import argparse
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.models.small_models import small_model
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

import labkit
from labkit.models.policies import policy_for
from labkit.models.policy import Policy
from labkit.models.shards import Shard, shard
from labkit.weights.checkpoint.described import described_source
from labkit.weights.model_tensors import ModelTensors

MEGATRON = {
    "ln_1": "input_layernorm",
    "attn.c_attn": "attention.query_key_value",
    "attn.c_proj": "attention.dense",
    "ln_2": "post_attention_layernorm",
    "mlp.c_fc": "mlp.dense_h_to_4h",
    "mlp.c_proj": "mlp.dense_4h_to_h",
}
GPT2: dict[str, Any] = {"n_head": 6, "n_embd": 60, "n_layer": 2}
WIDE: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "bloom": {"n_head": 6, "n_layer": 2},
    "gpt-neox-parallel": {"num_attention_heads": 6, "num_hidden_layers": 2},
    "opt": {"num_attention_heads": 6, "num_hidden_layers": 2},
    "llama": {"num_key_value_heads": 6, "num_hidden_layers": 2},
    "qwen3": {"num_key_value_heads": 6, "num_hidden_layers": 2},
}
COLUMNS: tuple[str, ...] = (
    "attn.c_proj.weight",
    "mlp.c_proj.weight",
    "self_attention.dense.weight",
    "attention.dense.weight",
)
COLUMNS += ("dense_4h_to_h.weight", "out_proj.weight", "fc2.weight", "o_proj.weight", "down_proj.weight")


@cache
def model(name: str) -> PreTrainedModel:
    return small_model(name, **WIDE[name])


def state(name: str) -> dict[str, Tensor]:
    tied = model(name).config.tie_word_embeddings
    tensors = model(name).state_dict().items()
    return {key: tensor.contiguous() for key, tensor in tensors if not (tied and key == "lm_head.weight")}


def canonical(policy: Policy, part: Shard, source: Any) -> dict[str, Tensor]:
    def get(name: str, cut: Any) -> Tensor:
        tensor = source.get(name, None, cut)
        assert isinstance(tensor, Tensor)
        return tensor

    return policy.top_tensors(part, get) | policy.layer_tensors(part, 1, get)


def assert_is(
    model: PreTrainedModel, checkpoint: Any, base_dir: Path | str, sizes: tuple[int, ...] = (1, 2, 3)
) -> None:
    """Fails unless each rank, for each number of ranks, gets its part of the model from the checkpoint."""
    source = described_source(checkpoint, model.config, str(base_dir))
    policy = policy_for(model.config)
    for size in sizes:
        for rank in range(size):
            part = shard(policy.model_config(model.config), size, rank)
            actual, expected = canonical(policy, part, source), canonical(policy, part, ModelTensors(model))
            assert actual.keys() == expected.keys()
            assert not [name for name in actual if not torch.equal(actual[name], expected[name])]


def megatron_qkv(rows: Tensor, version: float) -> Tensor:
    """[3, heads, D] rows in the order of a version of Megatron."""
    by_head = rows.unflatten(0, (3, -1, 10))
    order = {0.0: (0, 1, 2), 1.0: (1, 2, 0), 2.0: (1, 0, 2)}[version]
    return by_head.permute(*order, *range(3, by_head.ndim)).reshape(rows.shape)


def write_megatron(folder: Path, files: int, version: float, **extra: Any) -> list[str]:
    """Writes the GPT-2 in the format of Megatron, in `files` files."""
    tensors, names = state("gpt2"), []
    for rank in range(files):
        transformer: dict[str, Tensor] = {}
        for key, tensor in tensors.items():
            kind = key.rsplit(".", 1)[1]
            if key.startswith("transformer.h."):
                _, _, layer, module = key.rsplit(".", 1)[0].split(".", 3)
                tensor = tensor.T if tensor.ndim == 2 else tensor
                if module == "attn.c_attn":
                    rank_rows = torch.cat([third.chunk(files)[rank] for third in tensor.chunk(3)])
                    tensor = megatron_qkv(rank_rows, version)
                elif module == "mlp.c_fc":
                    tensor = tensor.chunk(files)[rank]
                elif tensor.ndim == 2:
                    tensor = tensor.chunk(files, dim=1)[rank]
                transformer[f"layers.{layer}.{MEGATRON[module]}.{kind}"] = tensor.clone()
            elif key.startswith("transformer.ln_f"):
                transformer[f"final_layernorm.{kind}"] = tensor.clone()
        padded = torch.cat((tensors["transformer.wte.weight"], torch.zeros(144 - 131, 60)))
        embedding = {
            "word_embeddings": {"weight": padded.chunk(files)[rank].clone()},
            "position_embeddings": {"weight": tensors["transformer.wpe.weight"]},
        }
        saved = {
            "model": {"language_model": {"embedding": embedding, "transformer": transformer}},
            "args": argparse.Namespace(num_layers=2, params_dtype=torch.float16),
            "rng_state": [{"np_rng_state": np.random.get_state(), "torch": torch.get_rng_state()}],
            "iteration": 7,
            **extra,
        }
        names.append(f"mp_rank_{rank:02d}/model_optim_rng.pt")
        (folder / names[-1]).parent.mkdir(parents=True, exist_ok=True)
        torch.save(saved, folder / names[-1])
    return names


def write_tp(folder: Path, name: str, size: int, *, parts: int = 2) -> dict[str, Any]:
    """Writes a checkpoint in the format of DeepSpeed for `size` ranks, with `parts` files each; returns its
    description.
    """
    policy = policy_for(model(name).config)
    shared: dict[str, Tensor] = {}
    tensors: list[dict[str, Tensor]] = [{} for _ in range(size)]
    for key, tensor in state(name).items():
        module, kind = key.rsplit(".", 1)
        dim = 0
        if policy.transposed and ".h." in key and tensor.ndim == 2:
            dim = 1 if not key.endswith(COLUMNS) else 0
        elif key.endswith(COLUMNS):
            dim = 1
        summed = kind == "bias" and f"{module}.weight".endswith(COLUMNS)
        if "ln" in key or "norm" in key or "wpe" in key or "positions" in key or summed:
            shared[key] = tensor
        elif module.endswith("c_attn"):
            for rank in range(size):
                thirds = [third.chunk(size, dim)[rank] for third in tensor.chunk(3, dim)]
                tensors[rank][key] = torch.cat(thirds, dim).contiguous()
        else:
            for rank, share in enumerate(tensor.tensor_split(size, dim)):
                tensors[rank][key] = share.clone()
    torch.save(shared, folder / "non-tp.pt")
    names = []
    for part in range(parts):
        for rank in range(size):
            names.append(f"tp_{rank:02d}_{part:02d}.pt")
            torch.save(dict(list(tensors[rank].items())[part::parts]), folder / names[-1])
    return {
        "type": "ds_model",
        "checkpoints": {"non_tp": ["non-tp.pt"], "tp": names},
        "version": 1.0,
        "parallelization": "tp",
        "tp_size": size,
        "dtype": "float32",
    }


@pytest.mark.parametrize("files", [1, 2, 3])
@pytest.mark.parametrize("version", [0, 1.0, 2.0])
def test_megatrons_files_are_merged_and_split(version: float, files: int, tmp_path: Path) -> None:
    names = write_megatron(tmp_path, files, version)
    assert_is(model("gpt2"), {"type": "Megatron", "version": version, "checkpoints": names}, tmp_path)


def test_megatrons_files_tell_their_version(tmp_path: Path) -> None:
    names = write_megatron(tmp_path, 2, 2.0, checkpoint_version=2.0)
    assert_is(model("gpt2"), {"type": "Megatron", "checkpoints": names}, tmp_path, (2,))
    with pytest.raises(ValueError, match=r"version 0.0, but .*mp_rank_00.* says 2.0; correct the description"):
        assert_is(model("gpt2"), {"type": "Megatron", "version": 0, "checkpoints": names}, tmp_path)


@pytest.mark.parametrize("size", [1, 2, 3, 6])
@pytest.mark.parametrize("name", WIDE)
def test_what_deepspeed_saved_for_some_ranks_serves_any_number(name: str, size: int, tmp_path: Path) -> None:
    assert_is(model(name), write_tp(tmp_path, name, size), tmp_path)


def test_the_older_key_for_the_number_of_ranks_is_understood(tmp_path: Path) -> None:
    described = write_tp(tmp_path, "bloom", 2)
    described["mp_size"] = described.pop("tp_size")
    assert_is(model("bloom"), described, tmp_path, (1,))


def test_a_folder_that_deepspeed_wrote_is_enough(tmp_path: Path) -> None:
    (tmp_path / "ds_inference_config.json").write_text(json.dumps(write_tp(tmp_path, "gpt2", 2)))
    assert_is(model("gpt2"), str(tmp_path), "", (3,))


@pytest.mark.parametrize("suffix", ["bin", "safetensors"])
@pytest.mark.parametrize("kind", ["ds_model", "BLOOM", "bloom"])
def test_a_list_of_files_is_one_model(kind: str, suffix: str, tmp_path: Path) -> None:
    tensors = list(state("bloom").items())
    for index in range(3):
        share = dict(tensors[index::3])
        path = tmp_path / f"{index}.{suffix}"
        save_file(share, path) if suffix == "safetensors" else torch.save(share, path)
    described = {"type": kind, "version": 1.0, "checkpoints": [f"{index}.{suffix}" for index in range(3)]}
    assert_is(model("bloom"), described, tmp_path)
    (tmp_path / "ds.json").write_text(json.dumps(described))
    assert_is(model("bloom"), str(tmp_path / "ds.json"), "", (2,))
    assert_is(model("bloom"), "ds.json", tmp_path, (2,))


def test_a_string_is_one_file_or_folder_or_index(tmp_path: Path) -> None:
    model("llama").save_pretrained(tmp_path, max_shard_size="50KB")
    for name in ("model.safetensors.index.json", "."):
        assert_is(model("llama"), {"type": "ds_model", "checkpoints": name}, tmp_path, (2,))
    assert_is(model("llama"), str(tmp_path), "", (2,))
    assert described_source(tmp_path, model("llama").config, "").origin == f"ds_model checkpoint in {tmp_path}"
    torch.save(model("llama").state_dict(), tmp_path / "all.pt")
    assert_is(model("llama"), {"type": "ds_model", "checkpoints": "all.pt"}, tmp_path, (2,))


def test_an_engine_takes_its_weights_from_the_checkpoint(tmp_path: Path) -> None:
    """The given model only describes the architecture: it has other weights, or none."""
    torch.save(state("gpt2"), tmp_path / "all.pt")
    described = {"type": "ds_model", "checkpoints": "all.pt"}
    ids = torch.arange(1, 9)[None]
    expected = labkit.init_inference(model("gpt2"), dtype=torch.float32)(ids).logits
    config: PretrainedConfig = model("gpt2").config
    for architecture in (small_model("gpt2", seed=6, **GPT2), model("gpt2").to("cpu").config, on_meta(config)):
        engine = labkit.init_inference(architecture, dtype=torch.float32, checkpoint=described, base_dir=str(tmp_path))
        assert torch.equal(engine(ids).logits, expected)


def on_meta(config: PretrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return type(model("gpt2"))(config)
