"""Sides whose model stays on disk give vanilla's tokens, each from files of its own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models.small_models import small_model
from helpers.sweeps import swept

from labkit.engine.offload.footprint import OTHERS, Footprint
from labkit.harness.compare.compare import comparison_case
from labkit.harness.compare.disk_sides import SLOTS, STREAMED
from labkit.harness.compare.loaded_side import LoadedSide
from labkit.harness.compare.loader import FolderLoader, Room, check_side, loader_of
from labkit.harness.compare.plan import Schedule, SideSpec, prepare
from labkit.harness.compare.side_process import OutOfBudgetError
from labkit.weights.resolve import resolve
from labkit.weights.source import ModelSource
from labkit.weights.spec import WeightSpec

SIDES = ("hf-disk", "accelerate-disk", STREAMED)
PROMPT = torch.arange(40, 49).repeat(2, 1)
PROMPT[1] += 17
ARGS = {"attention_mask": torch.ones_like(PROMPT), "do_sample": False, "max_new_tokens": 8, "min_new_tokens": 8}
LAYERS = 6


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def source_of(name: str, folder: Path) -> ModelSource:
    """A small model whose layers do not all fit in memory."""
    layers: dict[str, Any] = {"gpt-neo": {"attention_types": [[["global", "local"], LAYERS // 2]]}}
    kinds = layers.get(name, {})
    small_model(name, num_hidden_layers=LAYERS, vocab_size=300, **kinds).save_pretrained(folder / "given")
    return resolve(folder / "given")


def room(memory_gb: float | None = None) -> Room:
    return Room(threads=1, batch=2, prompt=9, positions=17, memory_gb=memory_gb)


def side_of(name: str, source: ModelSource, folder: Path, memory_gb: float | None = None) -> LoadedSide:
    loader = loader_of(name)
    assert isinstance(loader, FolderLoader)
    folder.mkdir()
    loader.convert(name, source, "float32", folder)
    return loader.load(name, folder, source, torch.float32, room(memory_gb))


def least_gb(source: ModelSource) -> float:
    """Memory that the engine needs with as few resident layers as possible."""
    footprint = Footprint.of(WeightSpec.of(source.hf_config, torch.float32))
    return (footprint.outside + SLOTS * footprint.layer + footprint.beside_weights(2, 9, 17)) / 1e9


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    "name", swept(["llama", "gpt2", "gptj-tied", "bloom", "opt-post-norm", "gpt-neo", "qwen3"], ["llama", "gpt2"])
)
def test_tokens_are_those_of_vanilla(name: str, side: str, tmp_path: Path) -> None:
    source = source_of(name, tmp_path)
    loaded = side_of(side, source, tmp_path / "files", least_gb(source) + 1e-9)
    expected = source.hf_model(torch.float32).generate(PROMPT, **ARGS)
    assert torch.equal(loaded.generate(PROMPT, **ARGS), expected)
    assert loaded.name == side
    assert loaded.device.type == "cpu"


def test_the_engine_keeps_what_its_memory_has_room_for(tmp_path: Path) -> None:
    source = source_of("llama", tmp_path)
    least = least_gb(source)
    tight = side_of(STREAMED, source, tmp_path / "tight", least + 1e-9)
    assert "6 of 6 layers read from disk" in tight.impl
    assert tight.streamed_bytes > 0
    whole = side_of(STREAMED, source, tmp_path / "whole", least + OTHERS / 1e9)
    assert "all layers in memory" in whole.impl
    assert whole.streamed_bytes == 0
    with pytest.raises(OutOfBudgetError, match="the least that works with 3 slots"):
        side_of(STREAMED, source, tmp_path / "none", 0.99 * least)


def test_a_precision_may_be_named(tmp_path: Path) -> None:
    source = source_of("llama", tmp_path)
    loaded = side_of("fused-streamed:int8", source, tmp_path / "files")
    assert "int8" in loaded.impl
    assert loaded.generate(PROMPT, **ARGS).shape == (2, 17)


def test_other_sides_read_no_tensors_of_vanilla_into_memory(tmp_path: Path) -> None:
    """Hooks fetch the tensors of a layer, and drop them before the next step."""
    source = source_of("gpt2", tmp_path)
    for name in ("hf-disk", "accelerate-disk"):
        model = side_of(name, source, tmp_path / name).model
        assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


@pytest.mark.parametrize(
    ("side", "ranks", "memory_gb", "message"),
    [
        ("fused-streamed:int5", 1, None, "unknown precision 'int5'"),
        ("fused-streamed:stored", 1, None, "expected a precision into which weights are packed"),
        (STREAMED, 2, None, "expected a side that can be cut: fused, "),
        ("hf-disk", 2, None, "expected a side that can be cut: fused, "),
        ("hf-disc", 1, None, "did you mean 'hf-disk'"),
        ("hf-disk", 1, 0.0, "got memory_gb = 0, expected more than 0"),
        ("hf-disk", 1, float("nan"), "got memory_gb = nan, expected a number"),
    ],
)
def test_what_cannot_be_is_refused(side: str, ranks: int, memory_gb: float | None, message: str) -> None:
    case = comparison_case(model="tiny-llama", dtype="float32", batch=1, prompt=4, new=3, threads=1)
    case = case.model_copy(update={"memory_gb": memory_gb})
    with pytest.raises(ValueError, match=message):
        prepare([SideSpec(side, 1, ranks)], case, Schedule(rounds=2))


def test_on_a_gpu_they_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for side in SIDES:
        loader = loader_of(side)
        assert isinstance(loader, FolderLoader)
        with pytest.raises(ValueError, match=f"{side} is a side on CPUs only"):
            check_side(side, dtype="float32", batch=1)
