"""Names, random weights, checkpoints and tokenizers: all steps before an engine gets a model."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from helpers.models.engines import few_models
from helpers.models.small_models import VOCAB, small_config, small_model
from helpers.sweeps import sweep
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config

from labkit.models.dtypes import FLOAT_DTYPES
from labkit.models.presets import PRESETS, find_preset
from labkit.models.tokenizer import byte_tokenizer
from labkit.weights import hub, source
from labkit.weights.resolve import resolve
from labkit.weights.source import ModelSource, RandomWeights


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty cache; any request to a hub fails the test."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub.urllib.request, "urlopen", lambda *_, **__: pytest.fail("asked the hub while offline"))
    hub.hub_answers.cache_clear()


def random_source(name: str, seed: int = 0) -> ModelSource:
    return ModelSource(name, "random", small_config(name), RandomWeights(small_config(name), seed))


def saved(name: str, folder: Path) -> Path:
    small_model(name).save_pretrained(folder)
    return folder


def edit_weights(folder: Path, changes: dict[str, Tensor | None]) -> None:
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")


def test_a_preset_without_weights_says_that_it_is_random() -> None:
    resolved = resolve("EleutherAI/gpt-j-6b", seed=3)
    assert (resolved.name, resolved.origin) == ("gpt-j-6b", "random weights, seed 3, of the published gpt-j-6b shape")
    assert "published" not in resolve("tiny-llama").origin


def test_random_weights_do_not_depend_on_order_or_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "CHUNK", 1001)
    first, second = random_source("opt-post-norm"), random_source("opt-post-norm")
    forward = {name: first.get(name) for name in sorted(first.names())}
    for name in sorted(second.names(), reverse=True):
        assert forward[name].dtype == torch.float32
        assert torch.equal(second.get(name, torch.bfloat16), forward[name].bfloat16())
        assert torch.equal(second.get(name), forward[name])


def test_seeds_and_names_give_different_weights() -> None:
    zero, one = random_source("llama"), random_source("llama", seed=1)
    gate, up = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(zero.get(gate), one.get(gate))
    assert not torch.equal(zero.get(gate), zero.get(up))


def test_random_weights_have_the_scale_of_an_initialised_model() -> None:
    weights = RandomWeights(PRESETS["gpt2"].hf_config, 0)
    assert weights.get("transformer.h.3.mlp.c_fc.weight").std().item() == pytest.approx(0.02, rel=0.01)
    norm = weights.get("transformer.h.3.ln_1.weight")
    assert norm.mean().item() == pytest.approx(1, abs=0.02)
    assert norm.std().item() == pytest.approx(0.1, rel=0.2)
    assert weights.get("transformer.h.3.ln_1.bias").std().item() == pytest.approx(0.02, rel=0.2)


@few_models
@torch.no_grad()
def test_a_model_filled_tensor_by_tensor_is_whole(name: str) -> None:
    """Parameters come from the source, buffers equal the buffers of an ordinary model, tied weights are shared."""
    filled, same_source = random_source(name).hf_model(torch.float32), random_source(name)
    ordinary = AutoModelForCausalLM.from_config(small_config(name)).eval()
    buffers = dict(ordinary.named_buffers())
    assert dict(filled.named_buffers()).keys() == buffers.keys()
    for path, buffer in filled.named_buffers():
        assert torch.equal(buffer, buffers[path]), path
        assert buffer.dtype == buffers[path].dtype
    for path, parameter in filled.named_parameters():
        assert torch.equal(parameter, same_source.get(path)), path
    tied = filled.get_input_embeddings().weight is filled.get_output_embeddings().weight
    assert tied == filled.config.tie_word_embeddings
    ordinary.load_state_dict(filled.state_dict())
    ids = torch.arange(1, 30)[None]
    assert torch.equal(filled(ids).logits, ordinary(ids).logits)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES.values(), ids=FLOAT_DTYPES)
def test_a_model_has_the_dtype_that_was_asked_for(dtype: torch.dtype) -> None:
    model = random_source("gpt-neox-parallel").hf_model(dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert model.gpt_neox.rotary_emb.inv_freq.dtype == torch.float32
    assert model.dtype == dtype


def test_an_unsupported_dtype_lists_the_supported() -> None:
    with pytest.raises(ValueError, match=r"unsupported dtype 'int8'; expected one of float32, bfloat16"):
        resolve("tiny-gpt2").hf_model(torch.int8)


PEAK = """
import re, torch
from pathlib import Path
from labkit.weights.resolve import resolve
kilobytes = lambda field: int(re.search(rf"{field}:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
source = resolve("gpt2")
before = kilobytes("VmRSS")
model = source.hf_model(torch.bfloat16)
print(1024 * (kilobytes("VmHWM") - before), sum(p.nbytes for p in model.parameters()))
"""


@sweep
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_needs_no_second_copy_of_the_weights() -> None:
    process = subprocess.run([sys.executable, "-P", "-c", PEAK], capture_output=True, text=True, check=True)
    peak, weights = map(int, process.stdout.split())
    assert peak < 1.15 * weights


@few_models
@torch.no_grad()
def test_a_checkpoint_folder_is_the_model_that_was_saved(name: str, tmp_path: Path) -> None:
    original = small_model(name)
    original.generation_config.update(max_new_tokens=5)
    original.save_pretrained(tmp_path, max_shard_size="100KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    resolved = resolve(tmp_path)
    assert resolved.origin == f"checkpoint {tmp_path}"
    loaded = resolved.hf_model(torch.float32)
    ids = torch.arange(1, 30)[None]
    assert torch.equal(loaded(ids).logits, original(ids).logits)
    assert loaded.generation_config.max_new_tokens == 5


@pytest.mark.parametrize("zipped", [True, False])
@torch.no_grad()
def test_an_old_checkpoint_of_the_bare_decoder_is_read(tmp_path: Path, zipped: bool) -> None:
    """PyTorch files, names without the decoder's prefix, and masks stored with the weights."""
    original = small_model("gpt2")
    original.config.save_pretrained(tmp_path)
    stored = original.transformer.state_dict() | {
        "h.0.attn.bias": torch.ones(1, 1, 8, 8),
        "h.0.attn.masked_bias": torch.ones(1),
    }
    torch.save(stored, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    ids = torch.arange(1, 30)[None]
    assert torch.equal(resolve(tmp_path).hf_model(torch.float32)(ids).logits, original(ids).logits)


def test_a_tied_model_stored_under_its_head_only_has_its_embedding(tmp_path: Path) -> None:
    saved("qwen2", tmp_path)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    edit_weights(tmp_path, {"model.embed_tokens.weight": None, "lm_head.weight": embedding})
    assert torch.equal(resolve(tmp_path).get("model.embed_tokens.weight"), embedding)


def test_a_checkpoint_changed_on_disk_does_not_change_a_loaded_model(tmp_path: Path) -> None:
    model = resolve(saved("gpt2", tmp_path)).hf_model(torch.float32)
    expected = model.transformer.wte.weight.clone()
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek(2000)
        file.write(b"\x40" * 100_000)
    assert torch.equal(model.transformer.wte.weight, expected)


def test_missing_and_extra_tensors_are_named(tmp_path: Path) -> None:
    edit_weights(saved("gpt2", tmp_path), {"transformer.h.1.ln_2.bias": None, "score.weight": torch.zeros(2, 2)})
    with pytest.raises(ValueError, match=r"1 missing: transformer.h.1.ln_2.bias; 1 extra: transformer.score.weight"):
        resolve(tmp_path)


def test_heads_that_contradict_their_tie_are_refused(tmp_path: Path) -> None:
    edit_weights(saved("gpt2", tmp_path), {"lm_head.weight": torch.zeros(VOCAB, 60)})
    with pytest.raises(ValueError, match=r"lm_head.weight differs from transformer.wte.weight.*tie_word_embeddings"):
        resolve(tmp_path)


def test_a_quantised_tensor_is_named(tmp_path: Path) -> None:
    edit_weights(saved("gpt2", tmp_path), {"transformer.h.1.mlp.c_fc.weight": torch.zeros(60, 240, dtype=torch.int8)})
    with pytest.raises(ValueError, match=r"transformer.h.1.mlp.c_fc.weight is stored as torch.int8"):
        resolve(tmp_path).hf_model(torch.float32)


def test_a_config_of_another_shape_names_the_tensor(tmp_path: Path) -> None:
    saved("gpt2", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"n_inner": 100}))
    with pytest.raises(
        ValueError, match=r"transformer.h.0.mlp.c_fc.weight has shape \[60, 240\], expected \[60, 100\]"
    ):
        resolve(tmp_path).hf_model(torch.float32)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    weights = saved("gpt2", tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=r"model.safetensors cannot be read \(.*; download it again"):
        resolve(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    small_model("gpt2").save_pretrained(tmp_path, max_shard_size="100KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ValueError, match=f"lacks {shard.name}, which model.safetensors.index.json lists"):
        resolve(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "has no config.json"),
        (
            {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
            "unknown architecture BertForMaskedLM of model type .bert., from whose class .*; expected one of",
        ),
        ({"model_type": "nobody"}, "unknown model_type .nobody.; expected the config of one of GPT2LMHeadModel"),
        ({"model_type": "gpt2"}, "holds no weights; expected model"),
    ],
)
def test_a_folder_that_is_no_checkpoint_is_refused(
    tmp_path: Path, config: dict[str, object] | None, message: str
) -> None:
    if config:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        resolve(tmp_path)


def cached_on_hub(hub_id: str, config: GPT2Config, *, others: tuple[str, ...] = ()) -> None:
    """Fills the local cache as a download would, with the files of a checkpoint but without `others`."""
    repo = Path(constants.HF_HUB_CACHE) / f"models--{hub_id.replace('/', '--')}"
    folder, trees = repo / "snapshots" / "abc", repo / "trees"
    for subfolder in (repo / "refs", trees):
        subfolder.mkdir(parents=True)
    (repo / "refs" / "main").write_text("abc")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    entries = {name: {"size": 1, "blob_id": "1"} for name in (*(path.name for path in folder.iterdir()), *others)}
    (trees / "abc.json").write_text(json.dumps({"format_version": 1, "files": entries}))


@pytest.mark.parametrize(
    ("name", "hub_id"), [("gpt2", "openai-community/gpt2"), ("someone/their-model", "someone/their-model")]
)
def test_cached_weights_win_over_random_ones(name: str, hub_id: str) -> None:
    small = GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=300)
    cached_on_hub(hub_id, small, others=("README.md", "onnx/config.json", "flax_model.msgpack"))
    resolved = resolve(name)
    assert resolved.origin == f"hub {hub_id}"
    assert resolved.get("transformer.wte.weight").shape == (300, 8)


@pytest.mark.parametrize("missing", ["model.safetensors", "tokenizer.json"])
def test_a_half_cached_model_is_not_taken(missing: str) -> None:
    small = GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=300)
    cached_on_hub("openai-community/gpt2", small, others=("tokenizer.json",) * (missing == "tokenizer.json"))
    for path in Path(constants.HF_HUB_CACHE).rglob(missing):
        path.unlink()
    assert resolve("gpt2").origin.startswith("random weights")


@pytest.mark.parametrize(
    "error",
    [
        HfHubHTTPError("gated", response=mock.Mock()),
        HTTPError("timed out"),
        LocalEntryNotFoundError("not here"),
        HFValidationError("no such id"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("call", ["model_info", "snapshot_download"])
def test_a_model_that_the_hub_does_not_give_is_not_there(
    call: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = SimpleNamespace(siblings=[SimpleNamespace(rfilename="model.safetensors")])
    api = mock.Mock(**{"return_value.model_info.return_value": files})
    failing = api.return_value.model_info if call == "model_info" else mock.Mock()
    failing.side_effect = error
    monkeypatch.setattr(hub, "hub_answers", lambda: True)
    monkeypatch.setattr(hub, "_cached", lambda repo_id: None)
    monkeypatch.setattr(hub, "HfApi", api)
    monkeypatch.setattr(hub, "snapshot_download", failing)
    assert hub.checkpoint_folder("someone/their-model") is None


def test_the_hub_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    timeouts = []

    def unreachable(*_: object, timeout: float) -> None:
        timeouts.append(timeout)
        raise OSError("no network")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub.urllib.request, "urlopen", unreachable)
    assert resolve("gpt2").origin.startswith("random weights")
    assert resolve("gpt2-medium").origin.startswith("random weights")
    assert len(timeouts) == 1
    assert timeouts[0] <= 5


def test_a_checkpoint_keeps_its_own_tokenizer(tmp_path: Path) -> None:
    resolve("tiny-gpt2").hf_model(torch.float32).save_pretrained(tmp_path)
    assert resolve(tmp_path).tokenizer("hi")["input_ids"] == [104, 105]
    tokenizer = byte_tokenizer(512)
    tokenizer.add_tokens(["hi"])
    tokenizer.save_pretrained(tmp_path)
    assert resolve(tmp_path).tokenizer("hi")["input_ids"] == [512]
    assert resolve(tmp_path).tokenizer.padding_side == "left"


@pytest.mark.parametrize("name", ["someone/gpt2", "./gpt2", "gpt3", "", "gpt-j-6b/7"])
def test_an_unknown_name_says_what_is_expected_and_where_the_known_are_listed(name: str) -> None:
    assert find_preset(name) is None
    if name:
        with pytest.raises(ValueError, match=r"expected a checkpoint folder, .*`labkit models`"):
            resolve(name)
