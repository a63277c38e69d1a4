"""Device, tiles and launches of the Triton kernels. Does not import triton itself."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from labkit.system.errors import UserError
from labkit.system.rounding import ceil_div

from .tuned import Tile, TunedTiles, tuned_tiles

FEW_ROWS = 16  # rows that one pass over a weight serves; more go through torch's GEMM
NO_TILES = TunedTiles({})
ONE_PROGRAM = Tile(rows=1, depth=1024, warps=8)  # of kernels that have a program for each sequence
CPU = torch.device("cpu")


def interpreted() -> bool:
    """Whether Triton interprets its kernels on the CPU. This mode is for tests, and hundreds of times slower."""
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
    """Raises ValueError with the reason if the kernels can't run."""
    if reason := unavailable():
        raise UserError(reason)


def require_dependent_launch() -> None:
    """Raises ValueError on a GPU that can't start a kernel before the previous kernel has ended."""
    if not has_dependent_launch():
        major, minor = torch.cuda.get_device_capability()
        got = f"the {gpu_name()} has {major}.{minor}"
        raise UserError(f"dependent_launch needs compute capability 9.0 or more, {got}; leave it out")


@cache
def has_dependent_launch() -> bool:
    """Whether a kernel can start before the previous kernel has ended."""
    return not interpreted() and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def default_device() -> torch.device:
    """The current GPU; in the interpreter, the CPU."""
    return CPU if interpreted() else torch.device("cuda", torch.cuda.current_device())


def gpu_name() -> str | None:
    """The driver's name of the GPU, such as "NVIDIA H200"; None without a GPU."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


@cache
def processors() -> int:
    """Multiprocessors of the current GPU. In the interpreter there are a few, so that tests reach split kernels."""
    return 4 if interpreted() else torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


@dataclass
class Launcher:
    """Launches kernels one after the other."""

    pdl: bool = False  # programmatic dependent launch: a kernel starts while the previous one ends (capability 9.0)
    tiles: TunedTiles = NO_TILES  # from `labkit tune` on this GPU; other shapes get a default
    launched: list[str] | None = field(default_factory=list)  # names of the launched kernels; None keeps none

    def __call__(self, kernel: Any, grid: Sequence[int], tile: Tile, **arguments: Any) -> None:
        if self.launched is not None:
            self.launched.append(kernel.__name__.lstrip("_").removesuffix("_kernel"))
        options: dict[str, Any] = {"num_warps": tile.warps, "num_stages": tile.stages}
        if self.pdl:
            options["launch_pdl"] = True
        kernel[tuple(grid)](**arguments, PDL=self.pdl, **options)

    def tile(self, op: str, weight_type: str, rows: int, outputs: int, inputs: int) -> Tile:
        """The tile for `rows` activations times a matrix [outputs, inputs]."""
        return self.batch_tile(op, weight_type, padded_rows(rows), outputs, inputs)

    def batch_tile(self, op: str, weight_type: str, batch: int, outputs: int, inputs: int) -> Tile:
        """The tile of a kernel whose programs multiply a matrix by `batch` rows of activations."""
        return self.tiles.find(op, weight_type, batch, outputs, inputs) or default_tile(
            op, weight_type, batch, outputs, inputs
        )


@cache
def default_launcher() -> Launcher:
    """A launcher with the tiles that were tuned for this GPU, if any."""
    name = gpu_name()
    return Launcher(tiles=tuned_tiles(name) if name else NO_TILES, launched=None)


def default_tile(op: str, weight_type: str, batch: int, outputs: int, inputs: int) -> Tile:
    """The tile for a shape that was not tuned. In the compiled code every lane has loads of 16 bytes in flight, and
    every multiprocessor several programs. In the interpreter there are few programs, because each takes long.

    On an H100 a step of Llama-2-7B in float16 took 7 % less time with whole rows of 4,096 inputs than with 1,024 inputs
    of 8 rows at a time. A step of GPT-J-6B in int8 took 6 % less when its first kernel loaded a tile ahead.
    """
    if interpreted():
        return Tile(rows=128, depth=128)
    if batch > FEW_ROWS:
        return Tile(rows=32 if weight_type == "float32" else 64, depth=32, stages=3)
    if batch > 1 and weight_type == "float32":  # not a type of the matrix unit, so a tile goes through registers
        return Tile(rows=32 if outputs >= 8192 else 16, depth=32, stages=4)
    if batch > 1:  # a warp multiplies 16 rows at once; a small matrix needs small tiles to have enough programs
        rows = 64 if outputs >= 8192 else 16
        depth = 64 if weight_type.startswith("int") else 128 if rows == 64 else 256
        return Tile(rows=rows, depth=depth, warps=max(2, rows // 16), stages=4)
    in_word = 8 if weight_type.startswith("int4") else 4 if weight_type.startswith("int8") else 1
    whole = 1 << (ceil_div(inputs, in_word) - 1).bit_length()
    grouped = weight_type.startswith("int8-")  # scales take registers too, as more codes in a word do
    if weight_type in ("float16", "bfloat16"):
        depth = whole if op != "head_argmax" and 1024 <= whole <= 4096 else 1024
        return Tile(rows=8192 // depth, depth=min(whole, depth))
    depth = 256 if grouped or in_word == 8 else 512
    return Tile(rows=8, depth=min(whole, depth), stages=2 if weight_type == "int8" and whole > depth else 1)


def padded_rows(rows: int) -> int:
    """Rows of activations in a tile: one, or the number of rows of the matrix unit."""
    return 1 if rows == 1 else FEW_ROWS


def dot_type(weights: torch.dtype) -> Any:
    """The type of the matrix unit's operands: the weights' type, bfloat16 for int8. In the interpreter float32 for
    both bfloat16 and int8.
    """
    import triton.language as tl

    if weights == torch.float16:
        return tl.float16
    return tl.float32 if weights == torch.float32 or interpreted() else tl.bfloat16


def optional(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    """The tensor, or else a stand-in pointer for an argument that the kernel won't read."""
    return stand_in if tensor is None else tensor
