"""The options `offload` and `kv_offload` of `init_inference`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from labkit.system.bounds import AMOUNT, BOUNDS
from labkit.system.errors import UnsupportedError, UserError
from labkit.system.validation import Strict

MOST_SLOTS = int(BOUNDS["slots"].most)


class Offload(Strict):
    """Where layers are that do not stay in memory: in that of the GPU, where there is one.

    device: "disk", or beside a GPU "cpu", for the host's memory. path: a folder on a disk for the packed weights, which
    are written once and used again; default: one in labkit's folder for caches. A checkpoint that labkit saved for the
    same ranks, type and implementation is used where it is.
    resident_gb: memory for the weights of each rank in GB (1e9 bytes), of its GPU where it has one: what is outside the
    layers, the slots, and as many layers as fit in the rest stay there; None: most of the memory that is available.
    slots: layers that are in memory at a time of those that are read, one in use and the others ahead of it.
    """

    device: Literal["disk", "cpu"] = "disk"
    path: str | Path | None = None
    resident_gb: float | None = Field(default=None, ge=0, le=AMOUNT.most, allow_inf_nan=False)
    slots: int = Field(default=3, ge=2, le=MOST_SLOTS)

    @model_validator(mode="after")
    def _no_folder_in_memory(self) -> Self:
        if self.device == "cpu" and self.path is not None:
            raise UserError("offload: got path beside device='cpu', which writes nothing; leave one of them out")
        return self

    def check_for(self, impl: str) -> None:
        """Raises ValueError where `impl` can't compute with layers that come from there."""
        if impl == "reference":
            raise UnsupportedError("offload needs the C++ or Triton kernels, and the reference ones run here")
        if impl == "cpp" and self.device == "cpu":
            raise UserError(
                "offload: got device='cpu' without a GPU: the weights are in CPU memory already; use device='disk', or "
                "leave offload out"
            )


class KvOffload(Strict):
    """Where keys and values lie that do not stay in memory: in that of the GPU, where there is one.

    device: "disk" for an engine on the CPU, or "cpu" for the pinned memory beside a GPU. path: a folder for the files
    of caches, which have no name and end with their caches; default: one in labkit's folder for caches.
    slots: layers whose keys and values are in memory at a time, of each cache: one in use and the others fetched ahead
    or written back.
    """

    device: Literal["disk", "cpu"] = "disk"
    path: str | Path | None = None
    slots: int = Field(default=3, ge=2, le=MOST_SLOTS)

    @model_validator(mode="after")
    def _no_folder_in_memory(self) -> Self:
        if self.device == "cpu" and self.path is not None:
            raise UserError("kv_offload: got path beside device='cpu', which writes nothing; leave one of them out")
        return self

    def check_for(self, impl: str) -> None:
        """Raises ValueError where `impl` can't read keys and values from there."""
        if impl == "reference":
            raise UnsupportedError("kv_offload needs the C++ or Triton kernels, and the reference ones run here")
        if impl == "triton" and self.device == "disk":
            raise UnsupportedError(
                "kv_offload: got device='disk' beside a GPU, whose keys and values come from the host's memory: use "
                "device='cpu', or impl='cpp'"
            )
        if impl == "cpp" and self.device == "cpu":
            raise UserError(
                "kv_offload: got device='cpu' without a GPU: the keys and values are in CPU memory already; use "
                "device='disk', or leave kv_offload out"
            )
