"""Random inputs for the ops, twice over: weights row by row for the references, in panels for the C++ kernels.

Sizes are odd on purpose. Everything that an op must not read is NaN, and so is everything that it must write.
"""

import os
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from labkit.kernels import build
from labkit.kernels.codes import group_size, quantize
from labkit.kernels.gemm import interleave_gate, packed
from labkit.kernels.types import Heads, LayerCache, Linear, Norm, Rotary, Rows, padded_head_dim
from labkit.system.processor import cpu_flags

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WEIGHTS = DTYPES | {"int8": torch.int8}
QUANTISED: dict[str, dict[str, Any]] = {  # ways to store a matrix, for Draw
    "int8-3-groups": {"groups": 3},
    "int8-32": {"group": 32},
    "int8-64-asymmetric": {"group": 64, "asymmetric": True},
    "int8-asymmetric": {"asymmetric": True},
    "int4": {"bits": 4},
    "int4-32": {"bits": 4, "group": 32},
    "int4-32-asymmetric": {"bits": 4, "group": 32, "asymmetric": True},
    "int4-96": {"bits": 4, "group": 96},
    "int4-128-asymmetric": {"bits": 4, "group": 128, "asymmetric": True},
}
ISAS = tuple(build.ISA_FLAGS)
UNIT = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}  # unit roundoff
UNIT[torch.int8] = UNIT[torch.bfloat16]  # keys, values and rows beside int8 weights


def missing_instructions(isa: str) -> str | None:
    """Why kernels built for `isa` cannot run here, or None."""
    before = os.environ.get("LABKIT_ISA")
    os.environ["LABKIT_ISA"] = isa
    try:
        build.instruction_set()
    except build.BuildError as error:
        return str(error)
    finally:
        del os.environ["LABKIT_ISA"]
        if before is not None:
            os.environ["LABKIT_ISA"] = before
    return None


def rounds_activations(dtype: torch.dtype) -> bool:
    """Whether rows are rounded to bfloat16 before they meet weights of `dtype`: where the CPU multiplies its pairs."""
    multiplies_pairs = build.instruction_set() in ("amx", "avx512") and "avx512_bf16" in cpu_flags()
    return dtype in (torch.bfloat16, torch.int8) and multiplies_pairs


def tolerance(dtype: torch.dtype, roundings: int = 1) -> float:
    """Largest error that a float32 sum may have, relative to the sum of its terms' magnitudes.

    `roundings`: how often a row is rounded to bfloat16 on the way, on machines with bf16 products.
    """
    return 4e-6 + (roundings * UNIT[torch.bfloat16] if rounds_activations(dtype) else 0.0)


def assert_near(got: Tensor, want: Tensor, scale: Tensor | float, tolerance: float) -> None:
    """|got - want| <= tolerance * scale everywhere; a NaN is never near."""
    assert got.shape == want.shape
    excess = (got.double() - want.double()).abs() / scale
    assert bool((excess <= tolerance).all()), f"off by {excess.max():.2e} of the scale, {tolerance:.2e} is allowed"


@dataclass
class Draw:
    """Random tensors, the same in every run."""

    dtype: torch.dtype = torch.float32
    seed: int = 0
    groups: int = 1  # of a row of quantised weights
    group: int | None = None  # inputs of each, in place of `groups`
    bits: int = 8
    asymmetric: bool = False
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def normal(self, *shape: int, std: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=self.generator) * std

    def linear(self, outputs: int, inputs: int, *, bias: bool = True, gated: bool = False) -> tuple[Linear, Linear]:
        """(for the reference, for the C++ kernels); gated: `outputs` gate rows, then as many up rows."""
        rows = outputs * (2 if gated else 1)
        weight = self.normal(rows, inputs, std=inputs**-0.5)
        scales, group = None, 0
        if self.dtype == torch.int8:
            group = self.group or group_size(inputs, self.groups, self.bits)
            weight, scales = quantize(weight, group, bits=self.bits, asymmetric=self.asymmetric)
        weight = weight.to(self.dtype)
        vector = self.normal(rows) if bias else None
        plain = Linear(weight, vector, rows, inputs, "rows", scales, group, self.bits)
        if gated:
            weight = interleave_gate(weight)
            vector = None if vector is None else interleave_gate(vector)
            scales = None if scales is None else interleave_gate(scales)
        return plain, packed(Linear(weight, vector, len(weight), inputs, "rows", scales, group, self.bits))

    @property
    def stored(self) -> torch.dtype:
        """Of keys and values beside such weights."""
        return torch.bfloat16 if self.dtype == torch.int8 else self.dtype

    def norm(self, kind: str, size: int) -> Norm:
        if kind == "none":
            return Norm()
        bias = self.normal(size) if kind == "layer" else None
        return Norm(kind, 1.0 + self.normal(size, std=0.2), bias, 1e-5)

    def rotary(self, dim: int, positions: int, *, interleaved: bool) -> Rotary:
        angles = torch.outer(torch.arange(positions).float(), 1e4 ** -(torch.arange(0, dim, 2) / dim))
        return Rotary(angles.cos(), angles.sin(), interleaved)

    def cache(self, heads: Heads, rows: Rows, past: int, capacity: int) -> tuple[LayerCache, LayerCache]:
        """Two equal caches with `past` slots filled, zeros beyond the head, and NaN in every slot after them."""
        shape = (rows.batch, heads.kv, capacity, padded_head_dim(heads.dim))
        filled: list[Tensor] = []
        for _ in range(2):
            slots = torch.full(shape, float("nan")).to(self.stored)
            slots[:, :, :past] = 0.0
            slots[:, :, :past, : heads.dim] = self.normal(rows.batch, heads.kv, past, heads.dim).to(self.stored)
            filled.append(slots)
        keys, values = filled
        return LayerCache(keys, values, past), LayerCache(keys.clone(), values.clone(), past)


def rows_of(batch: int, tokens: int, past: int = 0, *, mask: Tensor | None = None, slots: int | None = None) -> Rows:
    """`tokens` new tokens after `past`. `mask` [batch, past + tokens]: 0 hides a slot. Tables reach to `slots`.

    As the engine does, padding on the left is told by `first` alone.
    """
    total = past + tokens
    if mask is None:
        positions = torch.arange(total, dtype=torch.int32).expand(batch, total)
        first, visible = torch.zeros(batch, dtype=torch.int32), None
    else:
        positions = (mask.cumsum(1) - 1).clamp(min=0).to(torch.int32)
        first = torch.where(mask.any(1), mask.argmax(1), total).to(torch.int32)
        holes = int((mask == 0).sum()) != int(first.sum())
        visible = F.pad(mask.to(torch.uint8), (0, (slots or total) - total), value=1) if holes else None
    key_positions = F.pad(positions, (0, (slots or total) - total), value=-(10**6))
    new = positions[:, past:].reshape(-1).contiguous()
    return Rows(batch, tokens, new, first, visible, key_positions.contiguous())


def double(record: Any) -> Any:
    """A record of the ops in float64, its int8 weights multiplied out; tensors of integers stay as they are."""
    if isinstance(record, Tensor):
        return record.double() if record.is_floating_point() else record
    if isinstance(record, Linear):
        weight, bias = record.floats().double(), double(record.bias)
        return replace(record, weight=weight, bias=bias, layout="rows", scales=None, group=0)
    if is_dataclass(record) and not isinstance(record, type):
        return replace(record, **{field.name: double(getattr(record, field.name)) for field in fields(record)})
    return record


def moved(record: Any, device: str) -> Any:
    """A record of the ops with its tensors on another device."""
    if isinstance(record, Tensor):
        return record.to(device)
    if is_dataclass(record) and not isinstance(record, type):
        return replace(record, **{field.name: moved(getattr(record, field.name), device) for field in fields(record)})
    return record


def distance(got: Tensor, want: Tensor) -> float:
    """|got - want| / |want|, in Frobenius norms; infinite with a NaN."""
    assert got.shape == want.shape
    off = (got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-300)
    return float(off.nan_to_num(nan=float("inf")))


MASKS = ("none", "left", "holes", "row-of-padding")


def mask_for(kind: str, batch: int, total: int) -> Tensor | None:
    """What a batch sees of `total` slots: int64 [batch, total], None for all."""
    if kind == "none":
        return None
    mask = torch.ones(batch, total, dtype=torch.int64)
    if kind == "left":
        mask[0, : total // 3] = 0
    elif kind == "holes":
        mask[:, 1::3] = 0
        mask[-1, : total // 4] = 0
    else:
        mask[-1] = 0
    return mask
