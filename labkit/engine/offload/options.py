"""The options `offload` and `kv_offload` of `init_inference`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from labkit.system.validation import Strict


class Offload(Strict):
    """Where layers are that do not stay in memory.

    device: "disk", or "cpu" for the memory beside a GPU. path: a folder for the packed weights, which are written once
    and used again; default: one in labkit's folder for caches. A checkpoint that labkit saved for the same ranks and
    type is used where it is.
    resident_gb: memory for the weights of each rank in GB (1e9 bytes): what is outside the layers, the slots, and as
    many layers as fit in the rest stay there; None: most of the memory that is available. slots: layers that are in
    memory at a time of those that are read, one in use and the others ahead of it.
    """

    device: Literal["disk", "cpu"] = "disk"
    path: str | Path | None = None
    resident_gb: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    slots: int = Field(default=3, ge=2)


class KvOffload(Strict):
    """Where keys and values lie that do not stay in memory.

    device: "disk", or "cpu" for the memory beside a GPU. path: a folder for the files of caches, which have no name and
    end with their caches; default: one in labkit's folder for caches.
    slots: layers whose keys and values are in memory at a time, of each cache: one in use and the others read ahead or
    written back.
    """

    device: Literal["disk", "cpu"] = "disk"
    path: str | Path | None = None
    slots: int = Field(default=3, ge=2)
