"""Folders of checkpoints, damaged in hundreds of ways: each gives the right logits or a UserError, without delay.

A mutant changes bytes or values of one file. If the meaning stays the same, the model must stay the same: a config
whose fields have the same values, weights with the same numbers.
"""

import json
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from helpers.models.small_models import small_model
from helpers.sweeps import swept
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import labkit
from labkit.system.errors import UserError
from labkit.weights.resolve import resolve

IDS = torch.arange(1, 9)[None]
SECONDS = 10
NAMES = ("gpt2", "llama", "opt", "bloom", "gpt-neox-parallel")
JUNK: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2, 1.5, 10**12, float("inf"), float("nan"), "", "x", "~", "../x", "\0", [], [1], {}),
    *({"a": 1}, [[]], [None], ["model.safetensors"], "model.safetensors", {"rope_type": "yarn"}, "int8", "9" * 400),
)
BYTES = (b"", b"\0", b"\xff" * 8, b"{", b"}", b"[" * 200, b'"', b"9", b"-", b"\x80\x02", b"NaN", b"PK\x03\x04", b"\n")


@cache
def folder_of(name: str, kind: str, parent: Path) -> Path:
    """A checkpoint in one safetensors file, in several with an index, or in a PyTorch file."""
    folder, model = parent / f"{name}-{kind}", small_model(name)
    model.save_pretrained(folder, max_shard_size="60KB" if kind == "index" else "1GB")
    if kind == "bin":
        (folder / "model.safetensors").unlink()
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return folder


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Limits the processor time, so that other programs do not count. For waits, the timeout of the test applies."""

    def late(*_: object) -> None:
        raise TimeoutError(f"still at it after {seconds} s of processor")

    previous = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)


def outcome(folder: Path) -> torch.Tensor | None:
    """Logits of vanilla and engine, which must be equal, or None if one refuses. Any other error fails the test."""
    with at_most(SECONDS):
        try:
            source = resolve(folder)
            source.generation_config  # noqa: B018 - reading it must not fail
            fused = labkit.init_inference(source, dtype="float32", impl="reference")(IDS).logits
        except UserError:
            return None
        try:
            model = source.hf_model(torch.float32)
        except UserError:  # of a field that inference does not need
            return None
        with torch.no_grad():
            vanilla = model(IDS).logits
        torch.testing.assert_close(fused, vanilla, atol=1e-3, rtol=1e-3, equal_nan=True)
        return fused


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every path in a JSON value."""
    inside: list[Any] = (
        list(value.items() if isinstance(value, dict) else enumerate(value))[:200]
        if (isinstance(value, dict | list))
        else []
    )
    return [path, *(place for key, inner in inside for place in places(inner, (*path, key)))]


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


def without(value: Any, path: tuple[Any, ...]) -> Any:
    """`value` without the key at the end of the path."""
    copy = dict(value) if isinstance(value, dict) else list(value)
    if len(path) == 1:
        copy.pop(path[0])
    else:
        copy[path[0]] = without(value[path[0]], path[1:])
    return copy


def in_json(draw: Callable[[Any], Any], data: bytes) -> bytes:
    """Replaces one value, or removes its key."""
    value = json.loads(data)
    path = draw(st.sampled_from(places(value)))
    if path and isinstance(path[-1], str) and draw(st.booleans()):
        return json.dumps(without(value, path)).encode()
    return json.dumps(replaced(value, path, draw(st.sampled_from(JUNK)))).encode()


def in_bytes(draw: Callable[[Any], Any], data: bytes, first: int) -> bytes:
    """Replaces, inserts or removes some of the first bytes, or cuts off the file."""
    position = draw(st.integers(0, min(len(data), first) - 1))
    match draw(st.sampled_from(("replace", "insert", "drop", "cut"))):
        case "replace":
            new = draw(st.sampled_from(BYTES) | st.binary(min_size=1, max_size=4))
            return data[:position] + new + data[position + len(new) :]
        case "insert":
            return data[:position] + draw(st.sampled_from(BYTES)) + data[position:]
        case "drop":
            return data[:position] + data[position + draw(st.integers(1, 9)) :]
    return data[:position]


def in_header(draw: Callable[[Any], Any], data: bytes) -> bytes:
    """Replaces a value in the safetensors header, which stays well-formed."""
    length = int.from_bytes(data[:8], "little")
    header = in_json(draw, data[8 : 8 + length])
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def in_tensors(draw: Callable[[Any], Any], path: Path) -> None:
    """Changes the shape, type or name of a tensor, or removes it."""
    tensors = load_file(path)
    name = draw(st.sampled_from(sorted(tensors)))
    tensor = tensors.pop(name)
    match draw(st.sampled_from(("flat", "scalar", "longer", "turned", "integers", "half", "renamed", "gone"))):
        case "flat":
            tensors[name] = tensor.flatten()
        case "scalar":
            tensors[name] = torch.tensor(1.0)
        case "longer":
            tensors[name] = torch.cat((tensor, tensor))
        case "turned":
            tensors[name] = tensor.T.contiguous() if tensor.ndim == 2 else tensor[None].contiguous()
        case "integers":
            tensors[name] = tensor.to(torch.int8)
        case "half":
            tensors[name] = tensor.half()
        case "renamed":
            tensors[draw(st.sampled_from(("module.", "_orig_mod.", "x.", "", "base_model.model."))) + name] = tensor
    save_file(tensors, path)


def damage(draw: Callable[[Any], Any], folder: Path, kind: str) -> None:
    if kind == "config":
        path = folder / draw(st.sampled_from(("config.json", "config.json", "generation_config.json")))
        path.write_bytes(
            draw(st.sampled_from((in_json, lambda d, data: in_bytes(d, data, 4000))))(draw, path.read_bytes())
        )
    elif kind == "index":
        path = folder / "model.safetensors.index.json"
        path.write_bytes(
            draw(st.sampled_from((in_json, lambda d, data: in_bytes(d, data, 4000))))(draw, path.read_bytes())
        )
    elif kind == "tensors":
        in_tensors(draw, folder / "model.safetensors")
    elif kind == "header":
        path = folder / "model.safetensors"
        path.write_bytes(
            draw(st.sampled_from((in_header, lambda d, data: in_bytes(d, data, 4000))))(draw, path.read_bytes())
        )
    else:
        path = folder / "pytorch_model.bin"
        data = path.read_bytes()
        path.write_bytes(in_bytes(draw, data, len(data) if draw(st.booleans()) else 4000))


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the checkpoints whose copies are damaged."""
    return tmp_path_factory.mktemp("originals")


def check_some(kind: str, mutants: int, originals: Path) -> None:
    """Fails unless each mutant of a folder is the model, or a UserError."""

    @settings(
        max_examples=mutants,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],  # shrinking or explaining would trace every line of transformers
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def check_one(data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(NAMES))
        stored = "index" if kind == "index" else "bin" if kind == "pickle" else "whole"
        with TemporaryDirectory() as temporary:
            folder = Path(temporary)
            shutil.copytree(folder_of(name, stored, originals), folder, dirs_exist_ok=True)
            damage(data.draw, folder, kind)
            outcome(folder)

    check_one()


def mutants_of(value: Any) -> Iterator[Any]:
    """`value` with each part of it replaced by each junk, or removed."""
    for path in places(value):
        yield from (replaced(value, path, junk) for junk in JUNK)
        if path and isinstance(path[-1], str):
            yield without(value, path)


KINDS = ("config", "index", "tensors", "header", "pickle")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_folder_is_the_model_or_a_user_error(kind: str, originals: Path) -> None:
    check_some(kind, 8, originals)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("kind", swept(KINDS, ()))
def test_damaged_folders_by_hundreds_are_the_model_or_a_user_error(kind: str, originals: Path) -> None:
    check_some(kind, 80, originals)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("name", swept(NAMES, ()))
def test_every_value_of_a_config_replaced_by_every_junk(name: str, file: str, originals: Path, tmp_path: Path) -> None:
    shutil.copytree(folder_of(name, "whole", originals), tmp_path, dirs_exist_ok=True)
    for mutant in mutants_of(json.loads((tmp_path / file).read_text())):
        (tmp_path / file).write_text(json.dumps(mutant))
        try:
            outcome(tmp_path)
        except BaseException as error:
            error.add_note(f"{file}: {mutant}")
            raise
