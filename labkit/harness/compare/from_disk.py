"""Sides that leave the model on the disk and read its layers in every step: the engine's, accelerate's, transformers'.

Each reads files of its own, so that none finds in the page cache what another one has read.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from labkit.engine.offload.footprint import Footprint
from labkit.engine.offload.prepared import Wanted, prepared
from labkit.engine.options import Options
from labkit.harness.compare.baselines import Baseline, baseline, comparison_device, vanilla
from labkit.harness.compare.provider import Provider, Room
from labkit.harness.compare.sides import OutOfBudgetError
from labkit.kernels import build
from labkit.kernels.gpu import CPU
from labkit.models.dtypes import FLOAT_DTYPES
from labkit.models.policies import policy_for
from labkit.models.shards import shard
from labkit.system.errors import UserError
from labkit.weights.checkpoint.hf_folder import write_checkpoint
from labkit.weights.checkpoint.save import alone
from labkit.weights.precision import STORED, precision_of
from labkit.weights.source import ModelSource, empty_model, hf_shapes

HF_DISK, ACCELERATE_DISK, STREAMED = "hf-disk", "accelerate-disk", "fused-streamed"
SLOTS = 3


class FromDisk(Provider):
    """Sides on a CPU, since what they are measured by is the disk."""

    def check(self, side: str, *, dtype: str, batch: int) -> None:
        if comparison_device().type != "cpu":
            raise UserError(f"{side} is a side on CPUs only; hide the GPU with CUDA_VISIBLE_DEVICES=-1")


class AccelerateHooks(FromDisk):
    """Vanilla modules that fetch their weights as they are called, by accelerate's hooks."""

    def check(self, side: str, *, dtype: str, batch: int) -> None:
        super().check(side, dtype=dtype, batch=batch)
        if find_spec("accelerate") is None:
            raise UserError(f"{side} needs a package that is not installed; pip install accelerate")

    def get_ready(self, side: str, dtype: torch.dtype) -> None:
        import accelerate  # noqa: F401 - takes memory, which is none of the weights'

    def _side(self, side: str, how: str, source: ModelSource, model: PreTrainedModel, room: Room) -> Baseline:
        import accelerate

        torch.set_num_threads(room.threads)
        made = vanilla(side, f"accelerate {accelerate.__version__}, {how}", source, model)
        return replace(made, inputs_on=CPU)  # its own device is that of weights without memory


class HfDisk(AccelerateHooks):
    """transformers' own: safetensors files stay as they are, and the modules compute on mappings of them."""

    def convert(self, side: str, source: ModelSource, dtype: str, folder: Path) -> None:
        write_checkpoint(source, FLOAT_DTYPES[dtype], folder)

    def load(self, side: str, folder: Path, source: ModelSource, dtype: torch.dtype, room: Room) -> Baseline:
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            device_map={"": "disk"},
            offload_folder=folder / "offload",
            trust_remote_code=False,
        )
        return self._side(side, "device_map disk", source, model.eval(), room)


class AccelerateDisk(AccelerateHooks):
    """accelerate's `disk_offload`: every tensor is a file, which is copied into memory when its module is called."""

    def convert(self, side: str, source: ModelSource, dtype: str, folder: Path) -> None:
        """The files that `disk_offload` makes of a model in memory; a tied tensor is one file of two names."""
        from accelerate.utils import offload_weight, save_offload_index

        index: dict[str, Any] = {}
        for name in hf_shapes(source.hf_config):
            index = offload_weight(source.get(name, FLOAT_DTYPES[dtype]), name, folder, index)
        model = empty_model(source.hf_config, FLOAT_DTYPES[dtype])
        for tied, name in model.all_tied_weights_keys.items():
            (folder / f"{tied}.dat").hardlink_to(folder / f"{name}.dat")
            index[tied] = index[name]
        save_offload_index(index, folder)

    def load(self, side: str, folder: Path, source: ModelSource, dtype: torch.dtype, room: Room) -> Baseline:
        from accelerate import disk_offload

        model = empty_model(source.hf_config, dtype).eval()
        return self._side(side, "disk_offload", source, disk_offload(model, folder, execution_device=CPU), room)


class Streamed(FromDisk):
    """The engine with layers that pass through slots, in the dtype of the others or the precision that is named behind
    the colon. As many layers as its memory has room for stay there; without a limit, as `init_inference` chooses.
    """

    def check_name(self, side: str) -> None:
        _, colon, precision = side.partition(":")
        if precision == STORED:
            raise UserError(f"got {side}, expected a precision that the weights are packed in, such as {STREAMED}:int8")
        if colon:
            precision_of(precision)

    def check(self, side: str, *, dtype: str, batch: int) -> None:
        super().check(side, dtype=dtype, batch=batch)
        self.check_name(side)
        if reason := build.unavailable():
            raise UserError(f"{side} runs labkit's C++ kernels: {reason}")

    def get_ready(self, side: str, dtype: torch.dtype) -> None:
        build.load(_name(_options(side, _name(dtype)).dtype))

    def convert(self, side: str, source: ModelSource, dtype: str, folder: Path) -> None:
        options = _options(side, dtype)
        assert options.dtype is not None
        policy = policy_for(source.hf_config)
        config = policy.model_config(source.hf_config)
        wanted = Wanted(
            source=source,
            hf_config=source.hf_config,
            policy=policy,
            config=config,
            dtype=options.dtype,
            quant=options.quant,
            part=shard(config),
            impl="cpp",
        )
        prepared(wanted, folder, alone)

    def load(self, side: str, folder: Path, source: ModelSource, dtype: torch.dtype, room: Room) -> Baseline:
        offload: dict[str, Any] = {"device": "disk", "path": folder, "slots": SLOTS}
        if room.memory_gb is not None:
            offload["resident_gb"] = _for_weights(_options(side, _name(dtype)), source, room) / 1e9
        name = f"fused:{_precision(side, _name(dtype))}"
        made = baseline(name, source, dtype, room.threads, offload=offload)
        return replace(made, name=side, impl=f"{made.impl}, {_kept(made.model)}")


def _precision(side: str, dtype: str) -> str:
    return side.partition(":")[2] or dtype


def _options(side: str, dtype: str) -> Options:
    return Options(**precision_of(_precision(side, dtype)).options)


def _for_weights(options: Options, source: ModelSource, room: Room) -> float:
    """The bytes that weights may have of the memory of this side."""
    assert room.memory_gb is not None
    assert options.dtype is not None
    part = shard(policy_for(source.hf_config).model_config(source.hf_config))
    footprint = Footprint.of(part, options.dtype, options.quant)
    try:
        return footprint.for_weights(room.memory_gb * 1e9, room.batch, room.prompt, room.positions, SLOTS)
    except UserError as error:
        raise OutOfBudgetError(str(error)) from error


def _kept(engine: Any) -> str:
    if engine.streamed is None:
        return "all layers in memory"
    return f"{len(engine.streamed.layers)} of {len(engine.streamed.blocks)} layers read from disk in each step"


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


FROM_DISK: dict[str, Provider] = {HF_DISK: HfDisk(), ACCELERATE_DISK: AccelerateDisk(), STREAMED: Streamed()}
