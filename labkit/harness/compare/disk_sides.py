"""Sides that leave the model on the disk and read its layers in every step: the engine, accelerate and transformers.

Each side reads files of its own, so that no side profits from pages that another side left in the page cache.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from labkit.engine.offload.footprint import Footprint
from labkit.engine.offload.prepared import prepared
from labkit.engine.options import Options
from labkit.harness.compare.loaded_side import LoadedSide
from labkit.harness.compare.loader import FolderLoader, Room, load_side
from labkit.harness.compare.side_process import OutOfBudgetError
from labkit.harness.compare.sides import side_row
from labkit.harness.compare.vanilla_sides import vanilla
from labkit.harness.stored_weights import name_of
from labkit.kernels import build
from labkit.kernels.gpu import CPU
from labkit.models.dtypes import FLOAT_DTYPES
from labkit.system.collective import alone
from labkit.system.errors import UserError
from labkit.weights.checkpoint.hf_folder import write_checkpoint
from labkit.weights.precision import STORED, precision_of
from labkit.weights.source import ModelSource, empty_model, hf_shapes
from labkit.weights.spec import WeightSpec

HF_DISK, ACCELERATE_DISK, STREAMED = "hf-disk", "accelerate-disk", "fused-streamed"
SLOTS = 3


class AccelerateHooks(FolderLoader):
    """Vanilla modules with accelerate's hooks, which fetch the weights when a module is called."""

    def get_ready(self, side: str, dtype: torch.dtype) -> None:
        import accelerate  # noqa: F401 - imported now, so that its memory does not count as the weights'

    def _side(self, side: str, way: str, source: ModelSource, model: PreTrainedModel, room: Room) -> LoadedSide:
        import accelerate

        torch.set_num_threads(room.threads)
        loaded = vanilla(side, f"accelerate {accelerate.__version__}, {way}", source, model)
        return replace(loaded, inputs_on=CPU)  # the model's own device is "meta"


class HfDisk(AccelerateHooks):
    """transformers' own offloading: safetensors files stay as they are, and the modules compute on mappings of them."""

    def convert(self, side: str, source: ModelSource, dtype: str, folder: Path) -> None:
        write_checkpoint(source, FLOAT_DTYPES[dtype], folder)

    def load(self, side: str, folder: Path, source: ModelSource, dtype: torch.dtype, room: Room) -> LoadedSide:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, device_map={"": "disk"}, offload_folder=folder / "offload", trust_remote_code=False
        )
        return self._side(side, "device_map disk", source, model.eval(), room)


class AccelerateDisk(AccelerateHooks):
    """accelerate's `disk_offload`: every tensor is a file that is copied into memory when its module is called."""

    def convert(self, side: str, source: ModelSource, dtype: str, folder: Path) -> None:
        """Writes the files that `disk_offload` makes of a model in memory. A tied tensor is one file with two names."""
        from accelerate.utils import offload_weight, save_offload_index

        index: dict[str, Any] = {}
        for name in hf_shapes(source.hf_config):
            index = offload_weight(source.get(name, FLOAT_DTYPES[dtype]), name, folder, index)
        model = empty_model(source.hf_config, FLOAT_DTYPES[dtype])
        for tied, name in model.all_tied_weights_keys.items():
            (folder / f"{tied}.dat").hardlink_to(folder / f"{name}.dat")
            index[tied] = index[name]
        save_offload_index(index, folder)

    def load(self, side: str, folder: Path, source: ModelSource, dtype: torch.dtype, room: Room) -> LoadedSide:
        from accelerate import disk_offload

        model = empty_model(source.hf_config, dtype).eval()
        return self._side(side, "disk_offload", source, disk_offload(model, folder, execution_device=CPU), room)


class Streamed(FolderLoader):
    """The engine with offloaded layers that pass through slots. Its precision follows the colon in its name; without
    one it has the dtype of the other sides. The memory limit decides how many layers are resident; without a limit,
    `init_inference` does.
    """

    def check_name(self, side: str) -> None:
        precision = _precision(side)
        if precision == STORED:
            raise UserError(f"got {side}, expected a precision into which weights are packed, such as {STREAMED}:int8")
        if side_row(side).prefix:
            precision_of(precision)

    def check(self, side: str, *, dtype: str, batch: int) -> None:
        if reason := build.unavailable():
            raise UserError(f"{side} runs labkit's C++ kernels: {reason}")

    def get_ready(self, side: str, dtype: torch.dtype) -> None:
        build.load(name_of(precision_of(_precision(side) or name_of(dtype)).dtype or dtype))

    def convert(self, side: str, source: ModelSource, dtype: str, folder: Path) -> None:
        prepared(_spec(side, source, dtype), source, source.hf_config, folder, alone)

    def load(self, side: str, folder: Path, source: ModelSource, dtype: torch.dtype, room: Room) -> LoadedSide:
        offload: dict[str, Any] = {"device": "disk", "path": folder, "slots": SLOTS}
        if room.memory_gb is not None:
            offload["resident_gb"] = _weight_bytes(_spec(side, source, name_of(dtype)), room) / 1e9
        name = f"fused:{_precision(side) or name_of(dtype)}"
        loaded = load_side(name, source, dtype, room.threads, offload=offload)
        return replace(loaded, name=side, impl=f"{loaded.impl}, {_residence(loaded.model)}")


def _precision(side: str) -> str:
    """The precision in the side's name; empty for the dtype of the other sides."""
    return side.removeprefix(STREAMED).removeprefix(":")


def _spec(side: str, source: ModelSource, dtype: str) -> WeightSpec:
    options = Options(**precision_of(_precision(side) or dtype).options)
    assert options.dtype is not None  # only "stored" has none, and `check_name` refuses it
    return WeightSpec.of(source.hf_config, options.dtype, quant=options.quant)


def _weight_bytes(spec: WeightSpec, room: Room) -> float:
    """Bytes of the memory limit that are left for weights."""
    assert room.memory_gb is not None
    try:
        return Footprint.of(spec).for_weights(
            room.memory_gb * 1e9, room.batch, room.prompt, room.positions, SLOTS, by_experts=True
        )
    except UserError as error:
        raise OutOfBudgetError(str(error)) from error


def _residence(engine: Any) -> str:
    if (store := engine.expert_store) is not None:
        return f"{store.slots} of {store.layers * store.per_layer} experts in memory, others read from disk by need"
    if engine.streamed is None:
        return "all layers in memory"
    return f"{len(engine.streamed.layers)} of {len(engine.streamed.blocks)} layers read from disk in each step"
