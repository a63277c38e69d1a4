"""A checkpoint saved by some ranks gives any other number of ranks the same bits as the original model."""

from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models.engines import few_models
from helpers.models.small_models import SMALL_CONFIGS, small_model
from helpers.ranks.checkpoints import assert_same, built, quantization, save
from helpers.sweeps import crossed, paired
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from labkit.models.policies import policy_for
from labkit.models.shards import shard
from labkit.weights.checkpoint.tensor_stream import TensorStream
from labkit.weights.resolve import resolve

CUT = [name for name in SMALL_CONFIGS if name != "olmoe"]  # its norms over all heads cannot be cut
EIGHT = {"num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 160, "intermediate_size": 192}
WIDE: dict[str, dict[str, Any]] = {
    "gpt2": {"n_head": 8, "n_embd": 160},
    "llama": EIGHT | {"head_dim": 20},
    "gpt-neox-parallel": {"num_attention_heads": 8, "hidden_size": 160, "intermediate_size": 192},
}
STORED = [torch.float32, torch.bfloat16, torch.float16, torch.int8]
IMPLS = [("cpp", "reference"), ("reference", "cpp"), ("reference", "reference")]  # (writer, reader)
Trip = tuple[torch.dtype, tuple[int, ...], dict[str, Any]]
TRIPS: list[Trip] = [(dtype, path, {}) for dtype in STORED for path in ((1, 2, 4, 1), (8, 2), (1, 3, 1))]
TRIPS += [(torch.int8, path, {"q_groups": 4, "lm_head": True}) for path in ((1, 2, 4, 1), (8, 2))]
NIBBLES = {"num_bits": 4, "group_size": 32, "q_type": "asymmetric", "lm_head": True}

PARTS = ((1, 1), (4, 2), (2, 1), (2, 2), (4, 4))  # (ranks, parts of the experts)
DIVISIONS = {
    f"{saved[0]}-ep{saved[1]}-to-{loaded[0]}-ep{loaded[1]}": (saved, loaded) for saved, loaded in permutations(PARTS, 2)
}
KINDS_OF_EXPERTS = {"float32": (torch.float32, {}), "int8": (torch.int8, {"q_groups": 2})}


@cache
def wide(name: str) -> PreTrainedModel:
    return small_model(name, num_hidden_layers=2, **WIDE[name])


@cache
def small(name: str) -> PreTrainedModel:
    return small_model(name)


@pytest.mark.parametrize(("name", "sizes"), paired(CUT, [(2, 3), (1, 3), (3, 1), (3, 3)]))
def test_every_architecture_is_what_the_original_would_have_been(
    name: str, sizes: tuple[int, int], tmp_path: Path
) -> None:
    model, (saved_size, size) = small(name), sizes
    weights = save(tmp_path, model, model.config, size=saved_size)
    for rank in range(size):
        actual = built(weights, model.config, torch.float32, size, rank)
        assert_same(actual, built(model, model.config, torch.float32, size, rank))


@pytest.mark.parametrize(("name", "trip"), crossed(WIDE.keys(), TRIPS))
def test_saving_again_and_again_for_other_ranks_loses_nothing(name: str, trip: Trip, tmp_path: Path) -> None:
    model, (dtype, path, quant) = wide(name), trip
    source: object = model
    for step, size in enumerate(path):
        source = save(tmp_path / str(step), source, model.config, dtype, size, quant=quantization(**quant))  # type: ignore[arg-type]
    save(tmp_path / "at once", model, model.config, dtype, path[-1], quant=quantization(**quant))
    for rank in range(path[-1]):
        name = f"rank-{rank:02d}-of-{path[-1]:02d}.safetensors"
        actual, expected = (load_file(tmp_path / folder / name) for folder in (str(len(path) - 1), "at once"))
        assert actual.keys() == expected.keys()
        assert not [key for key in actual if not torch.equal(actual[key], expected[key])]


@pytest.mark.parametrize(
    ("parts", "name", "kind"), crossed(DIVISIONS, ("mixtral", "gpt-oss", "qwen2-moe"), KINDS_OF_EXPERTS)
)
def test_experts_are_divided_anew(
    parts: tuple[tuple[int, int], tuple[int, int]], name: str, kind: tuple[torch.dtype, dict[str, Any]], tmp_path: Path
) -> None:
    """Mixtral and GPT-OSS have five experts, so that some ranks have more than others."""
    heads: dict[str, Any] = {"num_attention_heads": 12, "num_key_value_heads": 4, "hidden_size": 144}
    model = small_model(name, num_hidden_layers=2, **heads)
    ((saved_size, saved_ep), (size, ep)), (dtype, options) = parts, kind
    quant, impl = quantization(**options), "reference" if saved_size == 4 else "cpp"
    weights = save(tmp_path, model, model.config, dtype, saved_size, ep_size=saved_ep, quant=quant, impl=impl)
    for rank in range(size):
        assert_same(
            built(weights, model.config, dtype, size, rank, ep_size=ep, quant=quant),
            built(model, model.config, dtype, size, rank, ep_size=ep, quant=quant),
        )


@pytest.mark.parametrize("impls", [("cpp", "cpp"), ("reference", "cpp")], ids="-to-".join)
@pytest.mark.parametrize("group_size", [32, 64])
def test_nibbles_survive_every_cut_between_their_groups(
    group_size: int, impls: tuple[str, str], tmp_path: Path
) -> None:
    """Cut into ranks of 64 inputs, merged again and cut once more."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
    sizes: dict[str, Any] = heads | {"hidden_size": 256, "intermediate_size": 256}
    model = small_model("llama", num_hidden_layers=1, **sizes)
    nibbles: dict[str, Any] = NIBBLES | {"group_size": group_size}
    quant = quantization(**nibbles)
    written, read = impls
    source: object = model
    for step, size in enumerate((1, 4, 2, 1)):
        source = save(tmp_path / str(step), source, model.config, torch.int8, size, quant=quant, impl=written)  # type: ignore[arg-type]
    for size in (1, 2):
        assert_same(
            built(source, model.config, torch.int8, size, size - 1, impl=read, quant=quant),  # type: ignore[arg-type]
            built(model, model.config, torch.int8, size, size - 1, impl=read, quant=quant),
        )


@pytest.mark.parametrize(("name", "impls", "dtype"), crossed(WIDE.keys(), IMPLS, STORED))
def test_another_implementation_reads_it_too(
    name: str, impls: tuple[str, str], dtype: torch.dtype, tmp_path: Path
) -> None:
    model, (written, read) = wide(name), impls
    weights = save(tmp_path, model, model.config, dtype, 2, impl=written)
    for size in (1, 2):
        assert_same(
            built(weights, model.config, dtype, size, size - 1, impl=read),
            built(model, model.config, dtype, size, size - 1, impl=read),
        )


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_another_type_is_rounded_from_the_saved_one(name: str, tmp_path: Path) -> None:
    model = wide(name)
    weights = save(tmp_path, model, model.config, torch.float32, 2)
    for dtype in (torch.bfloat16, torch.int8):
        assert_same(built(weights, model.config, dtype, 2, 1), built(model, model.config, dtype, 2, 1))


@few_models
def test_hugging_faces_tensors_come_back(name: str, tmp_path: Path) -> None:
    model = small(name)
    save(tmp_path, model, model.config, size=3 if name in CUT else 1)
    loaded = resolve(tmp_path).hf_model(torch.float32)
    state = model.state_dict()
    assert loaded.state_dict().keys() == state.keys()
    assert not [key for key, tensor in loaded.state_dict().items() if not torch.equal(tensor, state[key])]


@pytest.mark.parametrize("name", SMALL_CONFIGS)
def test_stored_undoes_what_makes_weights_canonical(name: str) -> None:
    config = small(name).config
    policy = policy_for(config)
    model_config = policy.model_config(config)
    state = small(name).state_dict()
    rebuilt: dict[str, Tensor] = {}
    for canonical, tensor in policy.layer_tensors(shard(model_config), 1, lambda name, _: state[name]).items():
        rebuilt |= policy.stored(model_config, canonical, tensor, 1)
    assert rebuilt
    assert all(torch.equal(tensor, state[name]) for name, tensor in rebuilt.items())


@pytest.mark.parametrize("tied", [False, True])
def test_a_rank_reads_each_tensor_of_its_own_file_once(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second copy of an embedding shared with the head would double the memory of a small model."""
    model = small_model("llama", num_hidden_layers=2, tie_word_embeddings=tied)
    weights = save(tmp_path, model, model.config, torch.int8, quant=quantization(lm_head=True))
    read: list[str] = []
    original = TensorStream.read_into

    def counted(stream: TensorStream, name: str, out: Tensor) -> Tensor:
        read.append(name)
        return original(stream, name, out)

    monkeypatch.setattr(TensorStream, "read_into", counted)
    built(weights, model.config, torch.int8, quant=quantization(lm_head=True))
    assert len(read) == len(set(read)) > 20
