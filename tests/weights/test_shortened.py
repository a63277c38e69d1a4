"""Files that become shorter while they are mapped are an error. Reading them would end the process with SIGBUS."""

import os
from pathlib import Path

import pytest
import torch
from helpers.models.gguf_files import gguf_model, write_gguf
from safetensors.torch import save_file

from labkit.system.errors import UserError
from labkit.weights.checkpoint.files import TensorFile
from labkit.weights.resolve import resolve

PAGES = 1 << 16  # numbers: a quarter of a megabyte


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_a_file_of_tensors_that_was_shortened_is_named(suffix: str, tmp_path: Path) -> None:
    path, tensors = tmp_path / f"model{suffix}", {"a": torch.ones(2, PAGES), "b": torch.ones(PAGES)}
    if suffix == ".bin":
        torch.save(tensors, path)
    else:
        save_file(tensors, path)
    file = TensorFile(path)
    mapped = {name: file.get(name) for name in tensors}
    assert torch.equal(file.present(mapped["a"][1:]), tensors["a"][1:])
    os.truncate(path, 8192)
    for tensor in mapped.values():
        with pytest.raises(UserError, match=f"{path.name} was shortened while it was read"):
            file.present(tensor)


def test_a_gguf_file_that_was_shortened_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", gguf_model("llama"))
    source = resolve(path)
    os.truncate(path, 8192)
    with pytest.raises(UserError, match=r"model\.gguf was shortened while it was read"):
        source.get("model.layers.1.mlp.down_proj.weight")


def test_what_is_not_mapped_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    torch.save({"a": torch.ones(4)}, path, _use_new_zipfile_serialization=False)
    file = TensorFile(path)
    tensor = file.get("a")
    os.truncate(path, 0)
    assert torch.equal(file.present(tensor), torch.ones(4))
