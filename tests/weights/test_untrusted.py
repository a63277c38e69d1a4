"""An untrusted checkpoint: its code is not run, its paths stay in its folder, and its lists may be wrong."""

import ast
import json
import re
import sys
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.house.source_tree import modules, tree
from helpers.models.small_models import small_model
from helpers.ranks.checkpoints import save
from safetensors.torch import load_file, save_file

import labkit
from labkit.models.tokenizer import byte_tokenizer
from labkit.system.errors import UserError
from labkit.weights.checkpoint.described import described_source
from labkit.weights.checkpoint.manifest import MANIFEST
from labkit.weights.checkpoint.saved import saved_weights
from labkit.weights.checkpoint.tensor_stream import TensorStream
from labkit.weights.checkpoint.tensor_writer import LENGTH
from labkit.weights.listed_files import listed_path
from labkit.weights.resolve import resolve

MODEL = small_model("gpt2")
OUTSIDE = ("../elsewhere/model.safetensors", "sub/../../elsewhere/model.safetensors", "{absolute}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint in several files, next to another one that its index could reach."""
    MODEL.save_pretrained(tmp_path / "elsewhere")
    MODEL.save_pretrained(tmp_path / "model", max_shard_size="100KB")
    return tmp_path / "model"


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def outside(name: str, folder: Path) -> str:
    return name.format(absolute=folder.parent / "elsewhere" / "model.safetensors")


def test_code_of_a_tokenizer_is_not_run_whatever_the_terminal_answers(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    byte_tokenizer(300).save_pretrained(folder)
    marker = tmp_path / "ran"
    (folder / "own.py").write_text(f"import pathlib\npathlib.Path({str(marker)!r}).touch()\nclass Own: pass\n")
    settings = {"auto_map": {"AutoTokenizer": [None, "own.Own"]}, "tokenizer_class": "Own"}
    edit(folder / "tokenizer_config.json", **settings)
    monkeypatch.setattr(sys, "stdin", StringIO("y\n" * 20))
    with suppress(UserError):  # some versions of transformers use their own class instead
        assert resolve(folder).tokenizer("hi")["input_ids"] == [104, 105]
    assert not marker.exists()
    assert sys.stdin.read() == "y\n" * 20


def test_code_of_a_model_is_not_run_whatever_the_terminal_answers(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "ran"
    (folder / "own.py").write_text(f"import pathlib\npathlib.Path({str(marker)!r}).touch()\nclass Own: pass\n")
    edit(folder / "config.json", auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"})
    monkeypatch.setattr(sys, "stdin", StringIO("y\n" * 20))
    assert type(resolve(folder).hf_model(torch.float32)) is type(MODEL)
    assert not marker.exists()


def test_transformers_is_told_everywhere_not_to_run_code() -> None:
    """Includes calls that could only load models or tokenizers that labkit refuses earlier, or not yet."""
    calls = [node for path in modules().values() for node in ast.walk(tree(path)) if isinstance(node, ast.Call)]
    auto = [ast.unparse(call) for call in calls if re.match(r"Auto\w+\.from_", ast.unparse(call.func))]
    assert len(auto) >= 3
    assert not [call for call in auto if "trust_remote_code=False" not in call]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tokenizer_config.json", '{"a":' * 100_000, "nests deeper than"),
        ("tokenizer_config.json", "{", "is not JSON"),
        ("tokenizer_config.json", "[]", "transformers cannot read the tokenizer"),
        ("generation_config.json", '{"a":' * 100_000, "nests deeper than"),
        (
            "generation_config.json",
            '{"eos_token_id": "5"}',
            r"config.json: got eos_token_id = .5., expected the id",
        ),
        ("generation_config.json", '{"bos_token_id": {"a": 1}}', "generation_config.json: got bos_token_id = "),
        ("generation_config.json", "[]", "transformers cannot read .*generation_config.json"),
    ],
    ids=lambda text: text[:24],
)
def test_settings_that_cannot_be_are_named(name: str, text: str, message: str, folder: Path) -> None:
    byte_tokenizer(300).save_pretrained(folder)
    (folder / name).write_text(text)
    source = resolve(folder)
    with pytest.raises(UserError, match=message):
        _ = source.tokenizer if name.startswith("tokenizer") else source.hf_model(torch.float32)


@pytest.mark.parametrize("name", ["a.bin", "sub/a.bin", "./a.bin", "a..b/..c"])
def test_a_name_below_the_folder_is_taken_as_it_is_written(name: str, tmp_path: Path) -> None:
    assert listed_path(tmp_path, name, tmp_path / "index.json") == tmp_path / name


@pytest.mark.parametrize(
    "name",
    ["../a", "/a", "a/../../b", "..", "a/..", "", 7, None, ["a"], "a\0b", "a\ud800", 256 * "a", 600 * "a/"],
    ids=repr,
)
def test_a_name_that_leaves_the_folder_or_is_none_is_refused(name: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"index.json lists .*(which leaves|expected the name of a file in)"):
        listed_path(tmp_path, name, tmp_path / "index.json")


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("stem", ["model.safetensors", "pytorch_model.bin"])
def test_an_index_may_not_name_files_elsewhere(stem: str, name: str, folder: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    (folder / "model.safetensors.index.json").unlink()
    weight_map = dict.fromkeys(index["weight_map"], outside(name, folder))
    (folder / f"{stem}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(UserError, match=rf"{stem}.index.json lists '.*', which leaves .*; a checkpoint may only name"):
        resolve(folder)


def test_the_links_of_the_hubs_cache_are_followed(folder: Path) -> None:
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(folder.glob("*.safetensors"))):
        path.rename(blobs / str(number))
        path.symlink_to(Path("..") / "blobs" / str(number))
    assert resolve(folder).names()


@pytest.mark.parametrize(
    "values", [{}, [], {"weight_map": []}, {"weight_map": {}}, {"weight_map": None}, {"weight_map": {"a": 1}}], ids=str
)
def test_an_index_that_lists_no_files_is_refused(values: Any, folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(values))
    with pytest.raises(
        UserError, match=r"model.safetensors.index.json (has no weight_map; expected|lists 1 as a file)"
    ):
        resolve(folder)


def test_an_index_that_nests_without_end_is_refused(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map":' * 100_000)
    with pytest.raises(UserError, match=r"model.safetensors.index.json nests deeper than"):
        resolve(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float7"}, "dtype: .*"),
        ({"dtype": "save"}, "dtype: .*"),
        ({"tp_size": 0, "files": []}, "tp_size: .*"),
        ({"tp_size": "two"}, "tp_size: .*"),
        ({"tp_size": 10**12}, r"lists 1 files for tp_size 1000000000000"),
        ({"layout": "diamonds"}, "layout: .*"),
        ({"groups": -1}, "groups: .*"),
        ({"model": None}, "model: .*"),
        ({"files": [{"name": "x"}]}, "files.0.bytes: .*"),
        ({"format": None}, "has format null; expected 5"),
    ],
    ids=str,
)
def test_a_manifest_with_a_field_that_cannot_be_is_refused(changes: Any, message: str, tmp_path: Path) -> None:
    save(tmp_path, MODEL, MODEL.config)
    edit(tmp_path / MANIFEST, **changes)
    with pytest.raises(UserError, match=rf"{MANIFEST} (is damaged \()?{message}"):
        resolve(tmp_path)


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_manifest_may_not_name_files_elsewhere(name: str, folder: Path, tmp_path: Path) -> None:
    save(tmp_path / "saved", MODEL, MODEL.config)
    manifest = json.loads((tmp_path / "saved" / MANIFEST).read_text())
    manifest["files"][0]["name"] = outside(name, folder)
    edit(tmp_path / "saved" / MANIFEST, files=manifest["files"])
    with pytest.raises(UserError, match=rf"{MANIFEST} lists '.*', which leaves .*saved; a checkpoint may only name"):
        resolve(tmp_path / "saved")


def test_the_manifest_of_an_older_labkit_is_read(tmp_path: Path) -> None:
    """It does not mention how a forward makes up positions."""
    saved = save(tmp_path, MODEL, MODEL.config)
    assert "positions_from_mask" not in saved.manifest.model
    assert saved_weights(tmp_path, saved.policy, saved.config) is not None


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 100_000,
        b"[]",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1000000000000], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-100, 4]}}',
    ],
    ids=lambda header: header[:50].decode(),
)
def test_a_header_that_is_none_is_damage(header: bytes, tmp_path: Path) -> None:
    path = tmp_path / "rank-00-of-01.safetensors"
    path.write_bytes(len(header).to_bytes(LENGTH, "little") + header + bytes(4))
    with pytest.raises(UserError, match=r"rank-00-of-01.safetensors is damaged"):
        TensorStream(path, {})


def listed(kind: str, name: str) -> dict[str, Any]:
    if kind == "tp":
        return {"type": "ds_model", "checkpoints": {"tp": [name]}, "tp_size": 1}
    return {"type": kind, "checkpoints": [name]}


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("kind", ["ds_model", "tp", "Megatron", "labkit"])
def test_a_description_that_came_with_a_checkpoint_may_not_name_files_elsewhere(
    kind: str, name: str, folder: Path
) -> None:
    for file in ("ds_inference_config.json", "checkpoints.json"):  # DeepSpeed's file, and one next to config.json
        (folder / file).write_text(json.dumps(listed(kind, outside(name, folder))))
    for checkpoint in (folder, folder / "ds_inference_config.json", folder / "checkpoints.json"):
        with pytest.raises(UserError, match=r"\w+.json lists '.*', which leaves .*model; a checkpoint may only name"):
            described_source(checkpoint, MODEL.config, "")


def test_the_base_dir_of_a_description_that_came_with_a_checkpoint_is_not_followed_elsewhere(folder: Path) -> None:
    """DeepSpeed records where it saved the files, which is no folder of this machine after copying."""
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    save_file({name: tensor * 2 for name, tensor in tensors.items()}, folder / "all.safetensors")
    save_file(tensors, folder.parent / "elsewhere" / "all.safetensors")
    description = listed("tp", "all.safetensors") | {"base_dir": str(folder.parent / "elsewhere")}
    (folder / "ds_inference_config.json").write_text(json.dumps(description))
    positions = described_source(folder, MODEL.config, "").get("transformer.wpe.weight")
    assert torch.equal(positions, MODEL.transformer.wpe.weight * 2)


def test_the_callers_own_description_may_name_any_file(folder: Path, tmp_path: Path) -> None:
    description = listed("ds_model", outside("{absolute}", folder))
    (tmp_path / "mine.json").write_text(json.dumps(description))
    for checkpoint in (description, tmp_path / "mine.json", listed("ds_model", "../elsewhere/model.safetensors")):
        base_dir = str(folder) if isinstance(checkpoint, dict) else ""
        assert described_source(checkpoint, MODEL.config, base_dir).names()


def test_what_a_killed_save_left_is_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / ".abc123.tmp.safetensors").write_bytes(b"half")
    (tmp_path / ".mine.safetensors").touch()
    labkit.init_inference(MODEL, dtype=torch.float32, impl="reference", save_mp_checkpoint_path=str(tmp_path))
    assert sorted(path.name for path in tmp_path.glob(".*")) == [".mine.safetensors"]
