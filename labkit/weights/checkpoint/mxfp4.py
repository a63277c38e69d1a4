"""Stacks of experts in MXFP4, as GPT-OSS is published: 4-bit floating-point numbers, 32 of which share a power of two.

The format: Open Compute Project, Microscaling Formats (MX), version 1.0. A number has a sign, two bits of exponent and
one of mantissa. A byte holds two numbers, the first one in its low bits. A scale is the exponent of a power of two with
the bias 127; 255 stands for NaN. bfloat16 has all of these numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from labkit.system.errors import UserError
from labkit.weights.checkpoint.files import TensorFile

BLOCKS, SCALES = "_blocks", "_scales"  # endings of the two tensors of a stack
BYTES = 16  # of a block of 32 numbers
VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
# By a byte: its two numbers, as bfloat16 one after the other.
PAIRS = (
    torch.cartesian_prod(*[torch.cat((VALUES, -VALUES))] * 2).flip(1).bfloat16().contiguous().view(torch.int32).numpy()
).ravel()
POWERS = torch.tensor([2.0**exponent for exponent in range(-127, 128)] + [torch.nan]).bfloat16()  # by a scale


@dataclass(frozen=True)
class TensorInFile:
    """A tensor in a file."""

    file: TensorFile
    name: str

    def get(self) -> Tensor:
        """The tensor as it is stored, mapped from the file."""
        return self.file.get(self.name)

    def present(self, tensor: Tensor) -> Tensor:
        """Returns a part of the tensor. UserError if its file has become shorter than that."""
        return self.file.present(tensor)


@dataclass(frozen=True)
class Mxfp4Stack:
    """The matrices of a layer's experts: uint8 blocks [E, outputs, groups, 16] and scales [E, outputs, groups]."""

    blocks: TensorInFile
    scales: TensorInFile

    def get(self) -> Tensor:
        """bfloat16 [E, inputs, outputs], as transformers keeps the stack. Raises UserError for blocks or scales of a
        wrong size.
        """
        blocks, scales = (part.file.present(part.file.bytes(part.name)) for part in (self.blocks, self.scales))
        if blocks.ndim != 4 or blocks.shape[-1] != BYTES or scales.shape != blocks.shape[:-1]:
            raise UserError(
                f"{self.blocks.name} has shape {list(blocks.shape)} and {self.scales.name} {list(scales.shape)}; "
                f"expected blocks [experts, outputs, groups, {BYTES}] and a scale for each of them: download the file "
                "again"
            )
        return dequantised(blocks, scales).transpose(1, 2)

    def present(self, tensor: Tensor) -> Tensor:
        return tensor


def dequantised(blocks: Tensor, scales: Tensor) -> Tensor:
    """Blocks uint8 [E, outputs, groups, 16] and their scales uint8 [E, outputs, groups] -> bfloat16 [E, outputs, 32 *
    groups]. A scale of 255 gives NaN.
    """
    numbers = torch.empty(*scales.shape, 2 * BYTES, dtype=torch.bfloat16)
    for expert, of_blocks, of_scales in zip(numbers, blocks, scales, strict=True):
        np.take(PAIRS, of_blocks.numpy(), out=expert.view(torch.int32).numpy(), mode="clip")
        expert.mul_(POWERS[of_scales.int()].unsqueeze(-1))
    return numbers.flatten(-2)


def with_stacks(places: Mapping[str, TensorInFile]) -> dict[str, TensorInFile | Mxfp4Stack]:
    """The tensors by name, where a stack takes the place of its two tensors."""
    joined: dict[str, TensorInFile | Mxfp4Stack] = dict(places)
    for name, blocks in places.items():
        stem = name.removesuffix(BLOCKS)
        if stem != name and stem not in places and stem + SCALES in places:
            joined[stem] = Mxfp4Stack(blocks, places[stem + SCALES])
            del joined[name], joined[stem + SCALES]
    return joined


def without_mxfp4(hf_config: PretrainedConfig) -> PretrainedConfig:
    """The config of the same model in floats, if its experts are in MXFP4; else the config itself."""
    quantization = getattr(hf_config, "quantization_config", None)
    if isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4":
        del hf_config.quantization_config
    return hf_config
