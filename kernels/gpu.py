"""Where the Triton kernels run, in which tiles, and how they are launched. No triton at import."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from labkit.system.errors import UserError

from .tuned import Tile, TunedTiles, tuned_tiles

FEW_ROWS = 16  # rows that one pass over a weight serves; more go through torch's GEMM
NO_TILES = TunedTiles({})
CPU = torch.device("cpu")


def interpreted() -> bool:
    """Whether Triton interprets its kernels on the CPU: to test them, hundreds of times slower than anything else."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def unavailable() -> str | None:
    """Why the Triton kernels can't run in this process, and what to do; None if they can."""
    if find_spec("triton") is None:
        return "impl 'triton' needs the package triton, which is not installed: pip install triton (Linux only)"
    if interpreted() or torch.cuda.is_available():
        return None
    return (
        "impl 'triton' needs an NVIDIA GPU and PyTorch's CUDA build, and found none; use impl='cpp', or set "
        "TRITON_INTERPRET=1 before Python starts to try the kernels slowly on the CPU"
    )


def require() -> None:
    """Raises ValueError with the reason where the kernels can't run."""
    if reason := unavailable():
        raise UserError(reason)


def require_dependent_launch() -> None:
    """Raises ValueError on a GPU that can't start a kernel before the one before it has ended."""
    major, minor = torch.cuda.get_device_capability()
    if major < 9:
        got = f"the {gpu_name()} has {major}.{minor}"
        raise UserError(f"dependent_launch needs compute capability 9.0 or more, {got}; leave it out")


def default_device() -> torch.device:
    """The current GPU; in the interpreter, the CPU."""
    return CPU if interpreted() else torch.device("cuda", torch.cuda.current_device())


def gpu_name() -> str | None:
    """As the driver calls it, "NVIDIA H200"; None without a GPU."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


@cache
def processors() -> int:
    """Multiprocessors of the current GPU; a few in the interpreter, so that what is split there is seen to work."""
    return 4 if interpreted() else torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


@dataclass
class Launcher:
    """Launches kernels one behind the other.

    pdl: programmatic dependent launch, each kernel started while the one before it ends (compute capability 9.0 on).
    tiles: what `labkit tune` found for this GPU; shapes that it doesn't know get a default. launched: the kernels'
    names; None keeps none.
    """

    pdl: bool = False
    tiles: TunedTiles = NO_TILES
    launched: list[str] | None = field(default_factory=list)

    def __call__(self, kernel: Any, grid: Sequence[int], tile: Tile, **arguments: Any) -> None:
        if self.launched is not None:
            self.launched.append(kernel.__name__.lstrip("_"))
        how: dict[str, Any] = {"num_warps": tile.warps, "num_stages": tile.stages}
        if self.pdl:
            how["launch_pdl"] = True
        kernel[tuple(grid)](**arguments, PDL=self.pdl, **how)

    def tile(self, op: str, weight_type: str, rows: int, outputs: int, inputs: int) -> Tile:
        """For `rows` activations times a matrix [outputs, inputs]."""
        batch = padded_rows(rows)
        return self.tiles.find(op, weight_type, batch, outputs, inputs) or default_tile(
            weight_type, batch, outputs, inputs
        )


@cache
def default_launcher() -> Launcher:
    """With the tiles that were tuned for this GPU, if any."""
    name = gpu_name()
    return Launcher(tiles=tuned_tiles(name) if name else NO_TILES, launched=None)


def default_tile(weight_type: str, batch: int, outputs: int, inputs: int) -> Tile:
    """The tile for a shape that was not tuned: every lane has loads of 16 bytes under way, and every multiprocessor
    several programs, as the compiled code shows. In the interpreter it gives few programs, because each takes long.
    """
    if interpreted():
        return Tile(rows=128, depth=128)
    if batch > 1 and weight_type == "float32":  # the matrix unit does not take it, so a tile goes through registers
        return Tile(rows=32 if outputs >= 8192 else 16, depth=32, stages=4)
    if batch > 1:  # a warp multiplies 16 rows at once; a small matrix gets small tiles, or it would have few programs
        rows = 64 if outputs >= 8192 else 16
        depth = 64 if weight_type.startswith("int") else 128 if rows == 64 else 256
        return Tile(rows=rows, depth=depth, warps=max(2, rows // 16), stages=4)
    in_word = 8 if weight_type.startswith("int4") else 4 if weight_type.startswith("int8") else 1
    whole = 1 << (-(-inputs // in_word) - 1).bit_length()
    grouped = weight_type.startswith("int8-")  # whose scales take registers too, as more codes in a word do
    depth = 1024 if weight_type in ("float16", "bfloat16") else 256 if grouped or in_word == 8 else 512
    return Tile(rows=8, depth=min(whole, depth))


def padded_rows(rows: int) -> int:
    """Rows of activations in a tile: one, or as many as the matrix unit takes."""
    return 1 if rows == 1 else FEW_ROWS


def dot_type(weights: torch.dtype) -> Any:
    """What the matrix unit multiplies: the weights' type, bfloat16 for int8; float32 for both in the interpreter."""
    import triton.language as tl

    if weights == torch.float16:
        return tl.float16
    return tl.float32 if weights == torch.float32 or interpreted() else tl.bfloat16


def optional(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    """A pointer for an argument that the kernel won't read."""
    return stand_in if tensor is None else tensor
