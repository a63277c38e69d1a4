"""A file that was never fetched, is empty or is of another kind is named as what it is."""

import os
from pathlib import Path

import pytest
from helpers.models.small_models import small_model
from helpers.ranks.checkpoints import save

from labkit.system.errors import UserError
from labkit.system.shown import shown_value
from labkit.weights.checkpoint.files import TensorFile
from labkit.weights.gguf.header import read_header
from labkit.weights.resolve import resolve

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n"
KINDS = ("pytorch_model.bin", "model.safetensors", "model.safetensors.index.json", "config.json", "model.gguf")


def refusal_of(name: str, content: bytes, folder: Path) -> str:
    """What labkit says to a checkpoint with this file."""
    small_model("gpt2").save_pretrained(folder)
    if name not in ("model.safetensors", "config.json"):
        (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(content)
    with pytest.raises(UserError) as refused:
        resolve(folder / name if name.endswith(".gguf") else folder)
    assert str(folder / name) in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("name", KINDS)
def test_a_pointer_of_git_lfs_says_how_to_fetch_the_file(name: str, tmp_path: Path) -> None:
    message = refusal_of(name, POINTER, tmp_path)
    assert "is a pointer of Git LFS, not the file itself; fetch that: git lfs pull" in message


@pytest.mark.parametrize("name", KINDS)
def test_an_empty_file_is_called_empty(name: str, tmp_path: Path) -> None:
    assert "is empty: " in refusal_of(name, b"", tmp_path)


@pytest.mark.parametrize(("name", "kind"), [("pytorch_model.bin", "PyTorch"), ("model.safetensors", "safetensors")])
@pytest.mark.parametrize("content", [b"<html>Not found</html>", b"hello", b".", b"\xff\xfe{\0"])
def test_a_file_of_another_kind_is_named_by_its_beginning(name: str, kind: str, content: bytes, tmp_path: Path) -> None:
    message = refusal_of(name, content, tmp_path)
    assert f"begins with {shown_value(content[:16])}, so it is no {kind} file" in message


def test_a_pickle_that_is_cut_short_ends_too_early(tmp_path: Path) -> None:
    assert "cannot be read (it ends too early)" in refusal_of("pytorch_model.bin", b"\x80\x02", tmp_path)


def test_a_pointer_in_a_saved_checkpoint_is_named(tmp_path: Path) -> None:
    model = small_model("gpt2")
    save(tmp_path / "saved", model, model.config, size=1)
    (file,) = (tmp_path / "saved").glob("*.safetensors")
    file.write_bytes(POINTER)
    with pytest.raises(UserError, match=rf"{file.name} is a pointer of Git LFS"):
        resolve(tmp_path / "saved")


def test_a_pipe_is_no_file_of_tensors(tmp_path: Path) -> None:
    for name, read in (("a.bin", TensorFile), ("a.gguf", read_header)):
        os.mkfifo(tmp_path / name)
        with pytest.raises(UserError, match=r"is a pipe|is no regular file"):
            read(tmp_path / name)
