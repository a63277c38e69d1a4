"""The options `offload` and `kv_offload` of `init_inference`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from labkit.system.bounds import AMOUNT, BOUNDS
from labkit.system.errors import UnsupportedError, UserError
from labkit.system.validation import Strict, one_problem

SLOTS_PER_CHOICE = 2  # the fewest experts in memory, for each that a row chooses
MOST_SLOTS = int(BOUNDS["slots"].most)


class Offloading(Strict):
    """The fields and checks that `Offload` and `KvOffload` have in common.

    OPTION: name of the option, for messages.
    OFFLOADED: what is offloaded, for messages.
    """

    OPTION: ClassVar[str]
    OFFLOADED: ClassVar[str]

    device: Literal["disk", "cpu"] = "disk"
    path: Annotated[str | Path | None, one_problem("a path")] = None
    slots: int = Field(default=3, ge=2, le=MOST_SLOTS)

    @model_validator(mode="after")
    def _no_folder_in_memory(self) -> Self:
        if self.device == "cpu" and self.path is not None:
            raise UserError(f"{self.OPTION}: got path with device='cpu', which writes nothing; leave one of them out")
        return self

    def check_for(self, impl: str) -> None:
        """Raises ValueError if `impl` can't read from this backing store."""
        if impl == "reference":
            raise UnsupportedError(f"{self.OPTION} needs the C++ or Triton kernels, and the reference ones run here")
        if impl == "cpp" and self.device == "cpu":
            raise UserError(
                f"{self.OPTION}: got device='cpu' without a GPU: the {self.OFFLOADED} are in CPU memory already; use "
                f"device='disk', or leave {self.OPTION} out"
            )


class Offload(Offloading):
    """Offloading of layers. Compute memory is the GPU's, or without a GPU the CPU's.

    device: backing store of offloaded layers: "disk", or with a GPU "cpu" for the host's memory.
    path: folder on a disk for the packed weights, which are written once and reused; default: a folder in labkit's
    folder for caches. A checkpoint that labkit saved for the same ranks, type and implementation is used directly.
    resident_gb: compute memory for the weights of each rank in GB (1e9 bytes). It holds the weights outside the layers,
    the slots, and as many resident layers as fit; None: most of the available memory.
    slots: offloaded layers in compute memory at a time: one in use, the others prefetched.
    experts: offload experts instead of layers, in a mixture of experts on the CPU. Everything else is resident, and so
    are the experts that were used most; the others are read when a row has chosen them. Layers are offloaded if memory
    is too small for that.
    """

    OPTION, OFFLOADED = "offload", "weights"

    resident_gb: float | None = Field(default=None, ge=0, le=AMOUNT.most, allow_inf_nan=False)
    experts: bool = True


class KvOffload(Offloading):
    """Offloading of keys and values. Compute memory is the GPU's, or without a GPU the CPU's.

    device: backing store: "disk" for an engine on the CPU, or "cpu" (pinned host memory) for an engine on a GPU.
    path: folder for the cache files, which have no name and are deleted with their caches; default: a folder in
    labkit's folder for caches.
    slots: layers of each cache in compute memory at a time: one in use, the others prefetched or written back.
    """

    OPTION, OFFLOADED = "kv_offload", "keys and values"

    def check_for(self, impl: str) -> None:
        super().check_for(impl)
        if impl == "triton" and self.device == "disk":
            raise UnsupportedError(
                "kv_offload: got device='disk' with a GPU, which reads keys and values from host memory only: use "
                "device='cpu', or impl='cpp'"
            )
