"""Random inputs for the ops, in two forms: weights row by row for the references, in panels for the C++ kernels.

Sizes are odd on purpose. Memory that an op must not read holds NaN, and so does memory that it must write.
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
OWN_ISA = build.instruction_set()  # of this machine; to build the kernels for another one takes a minute
UNIT = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}  # unit roundoff
UNIT[torch.int8] = UNIT[torch.bfloat16]  # of keys, values and rows that are used with int8 weights


def missing_instructions(isa: str) -> str | None:
    """Reason why kernels built for `isa` cannot run on this machine, or None."""
    previous = os.environ.get("LABKIT_ISA")
    os.environ["LABKIT_ISA"] = isa
    try:
        build.instruction_set()
    except build.BuildError as error:
        return str(error)
    finally:
        del os.environ["LABKIT_ISA"]
        if previous is not None:
            os.environ["LABKIT_ISA"] = previous
    return None


def rounds_activations(dtype: torch.dtype) -> bool:
    """Whether rows are rounded to bfloat16 before the product with weights of `dtype` (on CPUs with bf16 products)."""
    multiplies_pairs = build.instruction_set() in ("amx", "avx512") and "avx512_bf16" in cpu_flags()
    return dtype in (torch.bfloat16, torch.int8) and multiplies_pairs


def tolerance(dtype: torch.dtype, roundings: int = 1) -> float:
    """Largest error that a float32 sum may have, relative to the sum of the magnitudes of its terms.

    `roundings`: how often a row is rounded to bfloat16 on its way, on machines with bf16 products.
    """
    return 4e-6 + (roundings * UNIT[torch.bfloat16] if rounds_activations(dtype) else 0.0)


def assert_near(actual: Tensor, expected: Tensor, scale: Tensor | float, tolerance: float) -> None:
    """|actual - expected| <= tolerance * scale everywhere; a NaN is never near."""
    assert actual.shape == expected.shape
    excess = (actual.double() - expected.double()).abs() / scale
    assert bool((excess <= tolerance).all()), f"off by {excess.max():.2e} of the scale, {tolerance:.2e} is allowed"


@dataclass
class Draw:
    """Random tensors, the same in every run."""

    dtype: torch.dtype = torch.float32
    seed: int = 0
    groups: int = 1  # in a row of quantised weights
    group: int | None = None  # inputs in a group, instead of `groups`
    bits: int = 8
    asymmetric: bool = False
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def normal(self, *shape: int, std: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=self.generator) * std

    def linear(self, outputs: int, inputs: int, *, bias: bool = True, gated: bool = False) -> tuple[Linear, Linear]:
        """Returns (for the reference, for the C++ kernels); gated: `outputs` gate rows, then `outputs` up rows."""
        rows = outputs * (2 if gated else 1)
        weight = self.normal(rows, inputs, std=inputs**-0.5)
        scales, group = None, 0
        if self.dtype == torch.int8:
            group = self.group or group_size(inputs, self.groups, self.bits)
            weight, scales = quantize(weight, group, bits=self.bits, asymmetric=self.asymmetric)
        weight = weight.to(self.dtype)
        bias_vector = self.normal(rows) if bias else None
        plain = Linear(weight, bias_vector, rows, inputs, "rows", scales, group, self.bits)
        if gated:
            weight = interleave_gate(weight)
            bias_vector = None if bias_vector is None else interleave_gate(bias_vector)
            scales = None if scales is None else interleave_gate(scales)
        return plain, packed(Linear(weight, bias_vector, len(weight), inputs, "rows", scales, group, self.bits))

    @property
    def stored(self) -> torch.dtype:
        """Type of the keys and values that are used with weights of `dtype`."""
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
        """Two equal caches: `past` slots are filled, with zeros beyond the head; all later slots are NaN."""
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
    """`tokens` new tokens after `past`. `mask` [batch, past + tokens]: 0 hides a slot. Tables have `slots` entries.

    As in the engine, padding on the left is described by `first` alone.
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
    """A record of the ops in float64. Its int8 weights are dequantised; tensors of integers stay unchanged."""
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


def distance(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected|, in Frobenius norms; infinite if there is a NaN."""
    assert actual.shape == expected.shape
    relative = (actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-300)
    return float(relative.nan_to_num(nan=float("inf")))


MASKS = ("none", "left", "holes", "row-of-padding")


def mask_for(kind: str, batch: int, total: int) -> Tensor | None:
    """Mask of a batch with `total` slots: int64 [batch, total]; None if all are visible."""
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
