"""Recognition of GGUF files, files in several parts, and hostile headers."""

import os
import struct
import time
from pathlib import Path

import gguf
import pytest
import torch
from helpers.models.gguf_files import gguf_model, write_gguf

from labkit.system.errors import UserError
from labkit.weights.gguf.header import read_header
from labkit.weights.protocol import identity_of
from labkit.weights.resolve import resolve
from labkit.weights.source import ModelSource


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    (tmp_path / "whole").mkdir()
    return write_gguf(tmp_path / "whole" / "model.gguf", gguf_model("llama"))


def same(first: ModelSource, second: ModelSource) -> bool:
    return first.names() == second.names() and all(
        torch.equal(first.get(name), second.get(name)) for name in first.names()
    )


@pytest.mark.parametrize("name", ["sha256-0a1b2c", "M.GGUF", "model.bin", "my.model", "gpt2"])
def test_a_file_is_known_by_its_first_bytes(name: str, whole: Path, tmp_path: Path) -> None:
    file = whole.rename(tmp_path / name)
    assert resolve(file).gguf == file


@pytest.mark.parametrize("name", ["model.gguf", "sha256-0a1b2c"])
def test_a_folder_that_holds_one(name: str, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    file = whole.rename(folder / name)
    (folder / "README.md").write_text("a model")
    assert resolve(folder).gguf == file
    (folder / "other.gguf").write_bytes(file.read_bytes())
    with pytest.raises(UserError, match=r"holds 2 GGUF files \(.*other.gguf.*\); give one of them"):
        resolve(folder)


def test_all_parts_are_read_from_the_first(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    first = write_gguf(folder / "model.gguf", gguf_model("llama"), split=9)
    assert first.name == "model-00001-of-00003.gguf"
    source = resolve(first)
    assert same(source, resolve(whole))
    assert same(resolve(folder), source)
    identity = identity_of(source)
    second = folder / "model-00002-of-00003.gguf"
    os.utime(second, ns=(1, 1))
    assert identity_of(resolve(first)) != identity
    with pytest.raises(UserError, match=r"is part 2 of 3; give the first, model-00001-of-00003\.gguf"):
        resolve(second)
    second.rename(folder / "model-00009-of-00003.gguf")
    with pytest.raises(UserError, match=r"of 3 parts, and model-00002-of-00003\.gguf is missing"):
        resolve(first)
    os.link(folder / "model-00003-of-00003.gguf", second)
    with pytest.raises(UserError, match=r"model-00002-of-00003\.gguf is not part 2 of 3"):
        resolve(first)
    renamed = first.rename(folder / "first.gguf")
    with pytest.raises(UserError, match=r"expected a name that ends in -00001-of-00003\.gguf"):
        resolve(renamed)


def test_a_pipe_and_a_device_are_not_read(tmp_path: Path) -> None:
    pipe = tmp_path / "model.gguf"
    os.mkfifo(pipe)
    device = tmp_path / "zero.gguf"
    device.symlink_to("/dev/zero")
    for path in (pipe, device):
        with pytest.raises(UserError, match="no regular file"):
            resolve(path)
    with pytest.raises(UserError, match="unknown model"):
        resolve(pipe.rename(tmp_path / "pipe"))


@pytest.mark.parametrize("kind", ["I8", "I32", "F64"])
def test_a_type_without_floats_is_named(kind: str, whole: Path) -> None:
    """The type of a tensor follows its name and its sizes."""
    data, name = bytearray(whole.read_bytes()), b"output_norm.weight"
    number, (block, size) = gguf.GGMLQuantizationType[kind], gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    assert block == 1
    position = data.index(name) + len(name) + 4
    data[position : position + 8] = struct.pack("<Q", 64 * 4 // size)  # the same number of bytes
    data[position + 8 : position + 12] = struct.pack("<I", number)
    whole.write_bytes(data)
    with pytest.raises(UserError, match=f"output_norm.weight is stored as {kind}; expected F32"):
        resolve(whole)


def header(*keys: bytes, tensors: int = 0, count: int | None = None) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", 3, tensors, len(keys) if count is None else count) + b"".join(keys)


def key(name: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value


def nested(depth: int) -> bytes:
    return struct.pack("<IQ", 9, 1) * depth + struct.pack("<IQ", 4, 0)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (header(key("a", 9, nested(1))), "a list of lists"),
        (header(key("a", 9, nested(100_000))), "a list of lists"),
        (header(key("a", 13, b"")), "unknown type 13"),
        (header(key("a", 9, struct.pack("<IQ", 13, 1))), "a list of the unknown type 13"),
        (header(key("a", 8, struct.pack("<Q", 1 << 63))), "9223372036854775808 bytes of a string"),
        (header(key("a", 9, struct.pack("<IQ", 8, 1 << 40))), "1099511627776 items of a list"),
        (header(key("a", 9, struct.pack("<IQ", 8, 40) + bytes(64))), "has no end"),
        (header(key("a", 4, bytes(4)), key("a", 4, bytes(4))), "it has 'a' twice"),
        (header(key("general.alignment", 4, struct.pack("<I", 3))), "general.alignment is 3, expected a power of two"),
        (header(key("general.alignment", 9, struct.pack("<IQ", 6, 99) + bytes(396))), "general.alignment is a list"),
        (header(count=1 << 50), "1125899906842624 keys"),
        (header(struct.pack("<Q", 1) + b"\xff" + bytes(8)), "utf-8"),
        (header(struct.pack("<Q", 1) + b"t" + struct.pack("<I", 1 << 31), tensors=1, count=0), "dimensions"),
        (header(struct.pack("<Q1sIQIQ", 1, b"t", 1, 1 << 62, 0, 0), tensors=1, count=0), "bytes at 0, expected"),
        (header(struct.pack("<Q1sIQIQ", 1, b"t", 1, 33, 2, 0), tensors=1, count=0), "no whole blocks of 32"),
        (
            header(struct.pack("<Q1sIQIQ", 1, b"t", 1, 1, 0, 64) + bytes(200), tensors=1, count=0),
            "at 64, expected at 0",
        ),
        (struct.pack(">4sI", b"GGUF", 3) + bytes(16), "in big-endian order"),
    ],
)
def test_what_a_header_claims_is_bounded(data: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(data)
    with pytest.raises(UserError, match=message):
        read_header(file)


def test_a_long_string_is_read_at_once(tmp_path: Path) -> None:
    """Reading one of 4 MB took 35 s."""
    start = time.perf_counter()
    file = write_gguf(tmp_path / "model.gguf", gguf_model("llama"), metadata={"general.description": "x" * (4 << 20)})
    assert resolve(file).tokenizer("Hi")["input_ids"]
    assert time.perf_counter() - start < 15
