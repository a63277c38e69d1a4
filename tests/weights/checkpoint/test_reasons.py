"""Faults of a folder of weights give one line that names the cause; readable folders are read."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models.small_models import small_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

import labkit
from labkit.models.presets import find_preset
from labkit.system.cache_root import cache_root
from labkit.system.errors import UserError
from labkit.weights.checkpoint.described import described_source
from labkit.weights.checkpoint.files import TensorFile
from labkit.weights.resolve import resolve
from labkit.weights.source import weight_files

LLAMA, GPT2 = small_model("llama"), small_model("gpt2")
IDS = torch.arange(1, 9)[None]


def with_tensor(folder: Path, name: str, tensor: Tensor) -> Path:
    LLAMA.save_pretrained(folder)
    save_file(load_file(folder / "model.safetensors") | {name: tensor}, folder / "model.safetensors")
    return folder


def pickled(folder: Path, content: Any) -> Path:
    """Writes a GPT-2 whose PyTorch file of weights has this content."""
    GPT2.config.save_pretrained(folder)
    torch.save(content, folder / "pytorch_model.bin")
    return folder


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        (
            "model.layers.0.self_attn.k_proj.weight",
            (60, 70),
            r"parts of qkv.weight, .* cannot be joined: \S*k_proj.weight is \[60, 70\], expected \[rows, \d+\];",
        ),
        (
            "model.layers.0.self_attn.k_proj.weight",
            (),
            r"the parts of qkv.weight, .* cannot be joined: \S*k_proj.weight is \[\], ",
        ),
        (
            "model.layers.1.mlp.gate_proj.weight",
            (72,),
            r"the parts of ff1.weight, .* cannot be joined: \S*gate_proj.weight is \[72\], ",
        ),
        (
            "model.embed_tokens.weight",
            (131, 73),
            r"embed_tokens.weight has rows of shape \[73\], expected \[72\]",
        ),
        ("model.embed_tokens.weight", (131, 72, 2), r"model.embed_tokens.weight has rows of shape \[72, 2\], expected"),
        ("lm_head.weight", (131, 71), r"lm_head.weight has rows of shape \[71\], expected \[72\]"),
        ("lm_head.weight", (131,), r"lm_head.weight has rows of shape \[\], expected \[72\]"),
        ("lm_head.weight", (), r"lm_head.weight has shape \[\], expected 131 in dimension 0"),
    ],
)
def test_tensors_of_wrong_shapes_are_named(
    name: str, shape: tuple[int, ...], words: str, dtype: str, tmp_path: Path
) -> None:
    folder = with_tensor(tmp_path, name, torch.zeros(shape))
    with pytest.raises(UserError, match=words):
        labkit.init_inference(folder, dtype=dtype)


def test_joined_rows_of_no_shape_are_named(tmp_path: Path) -> None:
    model = small_model("bloom")
    name = "transformer.h.0.self_attention.query_key_value.bias"
    model.config.save_pretrained(tmp_path)
    torch.save({**model.state_dict(), name: torch.tensor(1.0)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=rf"{name} gives qkv.bias of shape \[\], expected \[180\]"):
        labkit.init_inference(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"hello world",
        b"PK\x03\x04 and no archive",
        b"\x80\x05.",
        b"eeee",
        b"",
        bytes(range(256)),
        b"\x80\x02N.",
        b"[1]",
    ],
    ids=lambda content: repr(content[:8]),
)
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_file_that_is_no_pickle_is_named(content: bytes, tmp_path: Path) -> None:
    GPT2.config.save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(UserError, match=r"pytorch_model.bin (cannot be read|holds|begins with|is empty)"):
        resolve(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            Tensor.to_sparse,
            r"c_fc.weight is stored as torch.sparse_coo in .*.bin; expected a dense tensor",
        ),
        (lambda tensor: tensor.to("meta"), r"c_fc.weight has no numbers in .*pytorch_model.bin \(it is on the meta"),
        (lambda tensor: tensor.to(torch.float8_e4m3fn), r"c_fc.weight is stored as torch.float8_e4m3fn in .*\.bin"),
        (lambda tensor: tensor.to(torch.complex64), r"c_fc.weight is stored as torch.complex64 in .*\.bin"),
    ],
    ids=["sparse", "meta", "fp8", "complex"],
)
def test_tensors_that_are_no_plain_floats_are_named(
    change: Callable[[Tensor], Tensor], words: str, tmp_path: Path
) -> None:
    state = GPT2.state_dict()
    name = "transformer.h.1.mlp.c_fc.weight"
    folder = pickled(tmp_path, {**state, name: change(state[name])})
    with pytest.raises(UserError, match=words):
        labkit.init_inference(folder)


PREFIXES = (
    *("_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module.module.", "model.", "_fsdp_wrapped_module."),
    *("_forward_module.", "_forward_module.model.", "base_model.model.", "state_dict.", "state_dict.model.", "net.a."),
    *("module.model._orig_mod.", "model._fsdp_wrapped_module.module."),
)


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("model", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_weights_below_the_prefix_of_a_trainer_are_the_models(
    model: PreTrainedModel, prefix: str, tmp_path: Path
) -> None:
    """Llama's own names begin with `model.`, too."""
    model.config.save_pretrained(tmp_path)
    torch.save(
        {f"{prefix}{name}": tensor for name, tensor in model.state_dict().items()}, tmp_path / "pytorch_model.bin"
    )
    assert torch.equal(resolve(tmp_path).hf_model(torch.float32)(IDS).logits, model(IDS).logits)


def test_layers_that_are_wrapped_one_by_one_are_the_models(tmp_path: Path) -> None:
    """FSDP and activation checkpointing wrap layers inside a model."""
    inner = "._fsdp_wrapped_module._checkpoint_wrapped_module."
    state = {
        re.sub(r"(h\.\d+)\.", rf"_fsdp_wrapped_module.\1{inner}", name): tensor
        for name, tensor in GPT2.state_dict().items()
    }
    folder = pickled(tmp_path, state)
    assert torch.equal(resolve(folder).hf_model(torch.float32)(IDS).logits, GPT2(IDS).logits)


def test_a_state_dict_in_a_trainers_file_is_the_model_and_the_rest_is_not(tmp_path: Path) -> None:
    trainer = {"epoch": 3, "callbacks": {"best": torch.zeros(1)}, "optimizer_states": [{"step": torch.zeros(1)}]}
    state = {f"model.{name}": tensor for name, tensor in GPT2.state_dict().items()}
    folder = pickled(tmp_path, {**trainer, "state_dict": state})
    assert torch.equal(resolve(folder).hf_model(torch.float32)(IDS).logits, GPT2(IDS).logits)


@pytest.mark.parametrize("prefix", ["model.", "base_model.model.", "net."])
def test_below_a_prefix_the_tensors_that_do_not_fit_are_named_alone(prefix: str, tmp_path: Path) -> None:
    state = GPT2.state_dict()
    absent = state.pop("transformer.h.1.mlp.c_fc.weight")
    state["transformer.h.1.mlp.c_xx.weight"] = absent
    words = (
        r"\(1 missing: transformer.h.1.mlp.c_fc.weight; 1 extra: transformer.h.1.mlp.c_xx.weight\); check that the "
        "weights and the config belong together"
    )
    with pytest.raises(UserError, match=words):
        resolve(pickled(tmp_path, {f"{prefix}{name}": tensor for name, tensor in state.items()}))


def test_an_adapter_below_the_prefix_of_peft_is_named(tmp_path: Path) -> None:
    state = GPT2.state_dict() | {"transformer.h.0.attn.c_attn.lora_A.default.weight": torch.zeros(1)}
    with pytest.raises(UserError, match=r"1 extra: transformer.h.0\S*\); an adapter of peft is not merged"):
        resolve(pickled(tmp_path, {f"base_model.model.{name}": tensor for name, tensor in state.items()}))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("transformer.h.0.attn.c_attn.lora_A.default.weight", r"an adapter of peft is not merged"),
        ("transformer.h.0.attn.c_attn.weight_g", "a parametrization such as weight norm is not folded"),
        ("transformer.h.0.attn.c_attn.weight_mask", "pruning is not folded"),
        ("transformer.h.0.attn.c_attn.qweight", "these are quantised weights of another library"),
    ],
)
def test_names_that_libraries_add_say_what_to_do(name: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"1 extra: {name}\); {words}"):
        resolve(pickled(tmp_path, {**GPT2.state_dict(), name: torch.zeros(1)}))


def test_a_decoder_without_its_head_is_named(tmp_path: Path) -> None:
    LLAMA.model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"1 missing: lm_head.weight\); these are the weights of a decoder without its"):
        resolve(tmp_path)


def test_dicts_without_end_are_refused(tmp_path: Path) -> None:
    """One dict contains itself. The others contain the next dict twice, so the names double with every level."""
    recursive: dict[str, Any] = {}
    recursive["a"] = recursive
    doubled: dict[str, Any] = {}
    for _ in range(25):
        doubled = {"a": doubled, "b": doubled}
    for number, content in enumerate((recursive, doubled)):
        torch.save(content, tmp_path / f"{number}.bin")
        with pytest.raises(UserError, match=rf"{number}.bin has more than \d+ values or 32 levels of dicts"):
            TensorFile(tmp_path / f"{number}.bin")


def test_a_whole_file_comes_before_an_index_as_in_transformers(tmp_path: Path) -> None:
    GPT2.save_pretrained(tmp_path)
    index = {"weight_map": {"transformer.wte.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]
    assert torch.equal(resolve(tmp_path).hf_model(torch.float32)(IDS).logits, GPT2(IDS).logits)


def test_parts_without_their_index_are_named(tmp_path: Path) -> None:
    GPT2.save_pretrained(tmp_path, max_shard_size="100KB")
    (tmp_path / "model.safetensors.index.json").unlink()
    words = r"holds model-00001-of-00010.safetensors, .*, but no model.safetensors.index.json, which lists the files"
    with pytest.raises(UserError, match=words):
        resolve(tmp_path)


def test_of_many_missing_files_a_few_are_named(tmp_path: Path) -> None:
    GPT2.config.save_pretrained(tmp_path)
    index = {"weight_map": {str(number): f"{number:05}.safetensors" for number in range(20_000)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"lacks 00000.safetensors, .* \(19992 more\), which") as refused:
        resolve(tmp_path)
    assert len(str(refused.value)) < 600


def test_an_adapter_is_refused_and_its_base_named(tmp_path: Path) -> None:
    GPT2.save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "someone/base"}))
    words = r"adapter_config.json describes an adapter of someone/base, which is not applied .*merge_and_unload\(\)"
    for load in (lambda: resolve(tmp_path), lambda: described_source(tmp_path, GPT2.config, "")):
        with pytest.raises(UserError, match=words):
            load()
    (tmp_path / "config.json").unlink()
    with pytest.raises(UserError, match=words):
        resolve(tmp_path)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "torch.float16", "auto", 7])
def test_a_type_in_a_config_that_no_weights_have_is_named(dtype: Any, tmp_path: Path) -> None:
    GPT2.save_pretrained(tmp_path)
    for name in ("dtype", "torch_dtype"):
        edit(tmp_path / "config.json", **({"dtype": None} | {name: dtype}))
        with pytest.raises(UserError, match=rf"config.json: {name} = .*; expected one of float32, bfloat16, float16"):
            resolve(tmp_path)
        edit(tmp_path / "config.json", **{name: None})


def test_a_head_of_its_own_in_files_of_ranks_is_refused(tmp_path: Path) -> None:
    torch.save({**GPT2.state_dict(), "lm_head.weight": torch.zeros(131, 60)}, tmp_path / "all.pt")
    described = {"type": "ds_model", "checkpoints": {"tp": ["all.pt"]}, "tp_size": 1}
    with pytest.raises(UserError, match=r"lm_head.weight differs from transformer.wte.weight.*tie_word_embeddings"):
        described_source(described, GPT2.config, str(tmp_path))


def test_folders_of_the_home_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_CACHE", str(cache_root()))  # keeps the compiled kernels
    monkeypatch.setenv("HOME", str(tmp_path))
    GPT2.save_pretrained(tmp_path / "mine")
    assert resolve("~/mine").names()
    for checkpoint, base_dir in (("~/mine", ""), ("mine", "~")):
        assert described_source(checkpoint, GPT2.config, base_dir).names()
    labkit.init_inference(GPT2, save_mp_checkpoint_path="~/saved")
    labkit.init_inference(GPT2, offload={"path": "~/packed"})
    assert {"mine", "saved", "packed"} <= {path.name for path in tmp_path.iterdir()}
    with pytest.raises(UserError, match="unknown model '~nobody-of-that-name/x'"):
        resolve("~nobody-of-that-name/x")


@pytest.mark.parametrize("name", ["~", ".", "..", "-", "/", "?", "EleutherAI/"])
def test_signs_are_no_name(name: str) -> None:
    assert find_preset(name) is None
