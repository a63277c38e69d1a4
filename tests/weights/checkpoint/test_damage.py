"""Faults of a checkpoint are named, and nothing in a checkpoint is ever executed."""

import errno
import json
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models.small_models import small_model
from helpers.ranks.checkpoints import built, load, save

import labkit
from labkit.models.policies import GPT2
from labkit.weights.checkpoint.described import described_source
from labkit.weights.checkpoint.manifest import MANIFEST
from labkit.weights.checkpoint.saved import saved_weights
from labkit.weights.quantise import Quantization
from labkit.weights.resolve import resolve

MODEL = small_model("gpt2")
CONFIG = MODEL.config
SECOND = "rank-01-of-02.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(tmp_path / "saved", MODEL, CONFIG, size=2)
    return tmp_path / "saved"


def described(values: Any, base_dir: Path | str = "") -> object:
    return described_source(values, CONFIG, str(base_dir))


class Malicious:
    """Writes a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return (Path.write_text, (self.target, "run"))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("kind", ["ds_model", "Megatron", "tp"])
def test_a_malicious_pickle_is_refused_and_not_run(kind: str, zipped: bool, tmp_path: Path) -> None:
    target, path = tmp_path / "created", tmp_path / "mp_rank_00.pt"
    content = OrderedDict(model=torch.zeros(3), evil=Malicious(target))
    if zipped:
        torch.save(content, path)
    else:
        path.write_bytes(pickle.dumps(content))
    description: dict[str, Any] = {"type": kind, "checkpoints": [path.name]}
    if kind == "tp":
        description = {"type": "ds_model", "checkpoints": {"tp": [path.name]}, "tp_size": 1}
    with pytest.raises(ValueError, match=r"mp_rank_00.pt (holds more than tensors|cannot be read)"):
        described(description, tmp_path)
    assert not target.exists()


def test_a_missing_file_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere.pt is missing; copy it there, or check the list of files"):
        described({"type": "ds_model", "checkpoints": ["nowhere.pt"]}, tmp_path)
    (folder / SECOND).unlink()
    with pytest.raises(ValueError, match=rf"{SECOND} is missing; copy it again, or save the checkpoint again"):
        resolve(folder)


def test_a_truncated_file_is_named(folder: Path, tmp_path: Path) -> None:
    data = (folder / SECOND).read_bytes()
    (folder / SECOND).write_bytes(data[:-100])
    with pytest.raises(ValueError, match=rf"{SECOND} has {len(data) - 100} bytes, expected {len(data)}; copy it again"):
        resolve(folder)
    torch.save(MODEL.state_dict(), tmp_path / "all.pt")
    (tmp_path / "all.pt").write_bytes((tmp_path / "all.pt").read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"all.pt cannot be read"):
        described({"type": "ds_model", "checkpoints": "all.pt"}, tmp_path)


@pytest.mark.parametrize("key", ["layers.1.qkv.weight", "layers.2.qkv.bias", "layers.0.ff2.weight"])
@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 1), (3, 2)])
def test_an_altered_tensor_is_named_whatever_part_of_it_is_read(
    size: int, rank: int, key: str, folder: Path, tmp_path: Path
) -> None:
    whole = (folder / SECOND).read_bytes()
    stored = load(folder, CONFIG).file(1)._stream.tensors[key]
    for position in (stored.offset, stored.offset + stored.nbytes - 1):
        (folder / SECOND).write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        message = rf"{SECOND} was altered: the digest of {key} is \w+, expected \w+; copy it again"
        with pytest.raises(ValueError, match=message):
            built(load(folder, CONFIG), CONFIG, torch.float32, size, rank)


@pytest.mark.parametrize("position", [0, 20, 60])
def test_a_damaged_header_is_named(position: int, folder: Path) -> None:
    data = bytearray((folder / SECOND).read_bytes())
    data[position : position + 8] = b"\xff" * 8
    (folder / SECOND).write_bytes(data)
    with pytest.raises(ValueError, match=rf"{SECOND} (is damaged|is of save)"):
        load(folder, CONFIG).file(1)


def test_files_of_two_saves_are_told_apart(folder: Path, tmp_path: Path) -> None:
    save(tmp_path / "other", small_model("gpt2", seed=6), CONFIG, size=2)
    (folder / SECOND).write_bytes((tmp_path / "other" / SECOND).read_bytes())
    with pytest.raises(
        ValueError, match=rf"{SECOND} is of save \w+, but the manifest of \w+; keep the files of each save"
    ):
        built(load(folder, CONFIG), CONFIG, torch.float32, 2, 1)


def test_the_manifest_of_another_model_is_refused(folder: Path) -> None:
    other_config = small_model("gpt2", n_layer=2).config
    with pytest.raises(
        ValueError, match=r"is of another model than the config given with it: num_layers = 3, expected"
    ):
        load(folder, other_config)


def test_a_manifest_from_before_a_field_of_the_model_is_read(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["model"]["experts"], manifest["model"]["logit_scale"]
    (folder / MANIFEST).write_text(json.dumps(manifest))
    assert load(folder, CONFIG).names()


@pytest.mark.parametrize("kind", ["Megatron", "tp"])
def test_shards_of_two_models_are_told_apart(kind: str, tmp_path: Path) -> None:
    tensors = {"transformer.layers.0.mlp.dense_h_to_4h.weight": torch.zeros(120, 60)}
    tensors["transformer.final_layernorm.weight"] = torch.ones(60)
    if kind == "tp":
        tensors = {"transformer.h.0.mlp.c_fc.weight": torch.zeros(60, 120)}
    description: dict[str, Any] = {"type": "Megatron", "checkpoints": ["0.pt", "1.pt"]}
    if kind == "tp":
        description = {"type": "ds_model", "checkpoints": {"tp": ["0.pt", "1.pt"]}, "tp_size": 2}
    for name, changed in (("shape", torch.zeros(7, 9)), ("value", torch.zeros(60)), ("name", None)):
        torch.save(tensors, tmp_path / "0.pt")
        key = list(tensors)[0 if name == "shape" else -1]
        other_tensors = tensors | {key: changed} if changed is not None else {"elsewhere.weight": torch.zeros(1)}
        torch.save(other_tensors, tmp_path / "1.pt")
        with pytest.raises(ValueError, match=r"0.pt.* (and|in) .*1.pt.*; all shards must come from one save"):
            described(description, tmp_path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"type": "Other", "checkpoints": ["a"]}, "type: got 'Other', expected 'Megatron', 'ds_model'"),
        ({"type": "Megatron"}, "checkpoints: is missing"),
        ({"type": "ds_model", "checkpoints": ["a"], "colour": 1}, "colour: got 1, is not known here"),
        ({"type": "ds_model", "checkpoints": ["a"], "version": 3}, "version 3.0 of ds_model is unknown; expected 1.0"),
        ({"type": "ds_model", "checkpoints": []}, "checkpoints lists no file; expected at least one"),
        ({"type": "ds_model", "checkpoints": {"tp": ["a"]}}, "tp_size is missing; say how many ranks"),
        ({"type": "ds_model", "checkpoints": {"tp": ["a"]}, "tp_size": 2}, "tp lists 1 files for tp_size 2; expected"),
        ({"type": "labkit", "checkpoints": "."}, "is no checkpoint of labkit's; expected a folder that it saved"),
        (["a.pt"], r"got \['a.pt'\], expected a checkpoint's description: a dict with type and checkpoints"),
    ],
)
def test_a_wrong_description_is_explained(values: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        described(values, tmp_path)


def test_an_unknown_version_of_megatrons_is_refused(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "0.pt")
    with pytest.raises(ValueError, match=r"Megatron version 4.0 is unknown; expected one of 0.0, 1.0, 2.0"):
        described({"type": "Megatron", "version": 4, "checkpoints": ["0.pt"]}, tmp_path)
    with pytest.raises(ValueError, match="a Megatron checkpoint is read as GPT2LMHeadModel, got LlamaForCausalLM"):
        described_source({"type": "Megatron", "checkpoints": ["0.pt"]}, small_model("llama").config, str(tmp_path))


def test_json_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text("{'type': ")
    with pytest.raises(ValueError, match=r"ds.json is not JSON \(.*\); expected DeepSpeed's description"):
        labkit.init_inference(MODEL, checkpoint=str(tmp_path / "ds.json"))
    with pytest.raises(ValueError, match=r"nowhere.json does not exist; expected a JSON description"):
        labkit.init_inference(MODEL, checkpoint=tmp_path / "nowhere.json")


def test_a_damaged_manifest_is_named(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    for text, message in (
        ("{", "is not JSON"),
        ("[]", "is damaged"),
        (json.dumps(manifest | {"tp_size": None}), "is damaged"),
        (json.dumps(manifest | {"format": 9}), "has format 9; expected 5: save it again"),
        (json.dumps(manifest | {"files": []}), "lists 0 files for tp_size 2"),
    ):
        (folder / MANIFEST).write_text(text)
        with pytest.raises(ValueError, match=f"{MANIFEST} {message}"):
            resolve(folder)


def test_more_ranks_than_heads_cannot_load_it(folder: Path) -> None:
    with pytest.raises(ValueError, match="3 query heads cannot be split over 4 ranks; use tp_size <= 3"):
        built(load(folder, CONFIG), CONFIG, torch.float32, 4, 0)


def test_int8_is_not_turned_back_or_quantised_again(tmp_path: Path) -> None:
    save(tmp_path, MODEL, CONFIG, torch.int8)
    with pytest.raises(ValueError, match=r"holds int8 weights, got dtype=torch.float32; pass dtype=torch.int8"):
        labkit.init_inference(resolve(tmp_path), dtype=torch.float32)
    quant = {"weight": {"q_groups": 2}}
    with pytest.raises(
        ValueError, match=r"was saved with quant={}, got {\"weight\":{\"q_groups\":2}}; leave quant out"
    ):
        labkit.init_inference(resolve(tmp_path), dtype=torch.int8, quant=quant)


def test_saved_4_bit_codes_need_no_options_and_take_no_other(tmp_path: Path) -> None:
    """Also with rounded activations, which are no property of the codes."""
    quant = {"weight": {"num_bits": 4}, "activation": {"enabled": True}}
    save(tmp_path, MODEL, CONFIG, torch.int8, quant=Quantization.model_validate(quant))
    engine = labkit.init_inference(resolve(tmp_path))
    assert engine.options.quant.weight.num_bits == 4
    with pytest.raises(ValueError, match=r"got {\"weight\":{\"num_bits\":8}}; leave quant out"):
        labkit.init_inference(resolve(tmp_path), quant={"weight": {"num_bits": 8}})


def test_an_interrupted_save_leaves_no_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two ranks fails to write: both report it, and the folder is no checkpoint until it is saved again."""
    replace = Path.replace

    def refused(path: Path, target: Path) -> Path:
        if target.name == SECOND:
            raise OSError(errno.EIO, "no disk", str(target))
        return replace(path, target)

    with monkeypatch.context() as broken:
        broken.setattr(Path, "replace", refused)
        with pytest.raises(RuntimeError, match=rf"the checkpoint was not saved: .*no disk.*{SECOND}"):
            save(tmp_path, MODEL, CONFIG, size=2)
    assert [path.name for path in tmp_path.iterdir()] == ["rank-00-of-02.safetensors"]
    with pytest.raises(ValueError, match="its save was interrupted; save it again"):
        load(tmp_path, CONFIG)
    save(tmp_path, MODEL, CONFIG, size=2)


def test_a_folder_that_holds_a_checkpoint_is_not_written_to(folder: Path, tmp_path: Path) -> None:
    times = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    with pytest.raises(ValueError, match=r"holds a checkpoint already; remove it, or name another folder"):
        labkit.init_inference(MODEL, save_mp_checkpoint_path=str(folder))
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == times
    MODEL.save_pretrained(tmp_path / "vanilla")
    with pytest.raises(ValueError, match=r"holds a checkpoint already"):
        labkit.init_inference(resolve(tmp_path / "vanilla"), save_mp_checkpoint_path=str(tmp_path / "vanilla"))


def test_a_folder_without_a_checkpoint_of_labkits_is_none(tmp_path: Path) -> None:
    assert saved_weights(tmp_path, GPT2, GPT2.model_config(CONFIG)) is None
