"""DeepSpeed's ZeRO-Inference: vanilla with parameters in files, each fetched when its module is called."""

from __future__ import annotations

import math
import os
import subprocess
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights

from labkit.harness.compare.loaded_side import LoadedSide
from labkit.harness.compare.loader import Room
from labkit.harness.compare.peers.folder import packages_in
from labkit.harness.compare.peers.peer import Peer
from labkit.harness.compare.peers.pip import Pip
from labkit.harness.compare.vanilla_sides import vanilla
from labkit.kernels.build import BuildError, compiler
from labkit.system.errors import UserError
from labkit.weights.source import ModelSource, hf_shapes

DEEPSPEED_ZERO = "deepspeed-zero"
BUFFERS = 5  # memory buffers of one tensor each; DeepSpeed's default
AIO = {
    "block_size": 1 << 20,
    "queue_depth": 8,
    "intra_op_parallelism": 1,
    "single_submit": False,
    "overlap_events": True,
}


class DeepSpeed(Peer):
    """DeepSpeed, compiled from source. Operators that it compiles itself are kept next to it.

    It writes the parameters into files of its own each time it starts. Parameters of less than 1 MB stay in memory.
    """

    name = "deepspeed"
    package = "deepspeed"
    requirements = (
        "deepspeed==0.19.6",
        *("hjson==3.1.0", "py-cpuinfo==9.0.0", "msgpack==1.2.4", "einops==0.8.2", "ninja==1.13.2"),
    )
    dtypes = ("float32", "bfloat16")

    def import_package(self) -> Any:
        packages = self.packages()
        assert packages is not None
        os.environ["PATH"] = f"{packages / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"  # for ninja
        os.environ["TORCH_EXTENSIONS_DIR"] = str(packages.parent / "extensions")
        os.environ["DS_ACCELERATOR"] = "cpu"
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
        return super().import_package()

    def install(self, pip: Pip, folder: Path) -> None:
        _require_libaio()
        package, *dependencies = self.requirements
        pip.build(pip.download_source(package), packages_in(folder), {"DS_BUILD_OPS": "0"})
        pip.install(tuple(dependencies), packages_in(folder))

    def convert(self, side: str, source: ModelSource, dtype: str, folder: Path) -> None:
        """Compiles DeepSpeed's operators, which takes minutes. Writes no model, because DeepSpeed writes its files each
        time it starts.
        """
        self.import_package()
        remove_abandoned_locks(Path(os.environ["TORCH_EXTENSIONS_DIR"]))
        import_module("deepspeed.ops.op_builder").AsyncIOBuilder().load(verbose=False)
        import_module("deepspeed.comm.torch").build_shm_op()

    def load(self, side: str, folder: Path, source: ModelSource, dtype: torch.dtype, room: Room) -> LoadedSide:
        api = self.import_package()
        torch.set_num_threads(room.threads)
        if not dist.is_initialized():
            dist.init_process_group("gloo", init_method=(folder / "store").as_uri(), rank=0, world_size=1)
        api.init_distributed("gloo", verbose=False)
        settings = zero_settings(source, dtype, folder)
        with api.zero.Init(config_dict_or_path=settings), no_init_weights():
            model = AutoModelForCausalLM.from_config(source.hf_config, dtype=dtype, trust_remote_code=False)
        model.tie_weights()
        for name, parameter in model.named_parameters():
            with api.zero.GatheredParameters([parameter], modifier_rank=0):
                parameter.data.copy_(source.get(name, dtype))
        engine = api.initialize(model=model, config=settings)[0]
        return vanilla(side, f"DeepSpeed {api.__version__}, ZeRO-Inference from files", source, engine.module.eval())


def zero_settings(source: ModelSource, dtype: torch.dtype, folder: Path) -> dict[str, Any]:
    """Settings of stage 3 with parameters in files of `folder`, and buffers of the largest tensor's size. All else is
    DeepSpeed's default.
    """
    largest = max(math.prod(shape) for shape in hf_shapes(source.hf_config).values())
    param = {
        "device": "nvme",
        "nvme_path": str(folder),
        "buffer_count": BUFFERS,
        "buffer_size": largest,
        "pin_memory": False,
    }
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": {"stage": 3, "offload_param": param},
        "aio": AIO,
    }


def remove_abandoned_locks(extensions: Path) -> None:
    """Removes the lock of each operator whose compilation was killed; torch would wait for it forever.

    torch keeps a lock open while it compiles (torch.utils.file_baton), so a lock that no process has open is abandoned.
    """
    locks = list(extensions.glob("*/lock"))
    if locks:
        open_files = _files_open_in_a_process()
        for lock in locks:
            if str(lock.resolve()) not in open_files:
                lock.unlink(missing_ok=True)


def _files_open_in_a_process() -> set[str]:
    paths: set[str] = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or belongs to another user, who cannot write into this folder
            paths |= {file.path for file in process.open_files()}
    return paths


def _require_libaio() -> None:
    """UserError where libaio, with which DeepSpeed reads files, cannot be compiled."""
    try:
        command = [*compiler(), "-x", "c++", "-E", "-include", "libaio.h", os.devnull]
    except BuildError as error:
        raise UserError(f"deepspeed cannot be compiled: {str(error).partition(':')[0]}; install g++") from None
    if subprocess.run(command, capture_output=True, check=False).returncode:
        raise UserError(
            "deepspeed reads files with libaio, which is missing; Debian, Ubuntu: apt-get install libaio-dev"
        )
