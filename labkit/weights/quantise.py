"""How quantised weights are stored, by the option `quant` and DeepSpeed's `quantization_setting`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Literal, Self, get_args

import torch
from pydantic import Field, model_validator
from torch import Tensor

from labkit.kernels.codes import (
    FINEST,
    SCALE_BYTES,
    check_flat,
    codes_of,
    cut_groups,
    flat_scales,
    group_size,
    scales_of,
)
from labkit.kernels.types import Linear, float_dtype
from labkit.models.shards import SUMMED, Shard
from labkit.system.errors import UserError
from labkit.system.rounding import ceil_div
from labkit.system.validation import Strict, one_problem

GroupSize = Literal[32, 64, 128]
GROUP_SIZES: tuple[int, ...] = get_args(GroupSize)
MLP = tuple(f"{prefix}{role}.weight" for prefix in ("", "shared_", "dense_") for role in ("ff1", "ff2"))
LAYER = ("qkv.weight", "attn_out.weight", *MLP)
HEAD = ("embed.weight", "head.weight")  # one of them is the LM head
SMALLEST_STEP = 2.0**-24  # between numbers of float16
FINE = 0.01  # relative error of a scale that still counts as fine
log = logging.getLogger("labkit")


class WeightQuantization(Strict):
    """`group_size` inputs of a row share a scale and, if asymmetric, a minimum. Without `group_size`, each row has
    `q_groups` groups.
    """

    enabled: bool = True
    num_bits: Literal[4, 8] = 8
    q_type: Literal["symmetric", "asymmetric"] = "symmetric"
    q_groups: int = Field(default=1, ge=1)
    group_size: GroupSize | None = None

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.group_size is not None and self.q_groups != 1:
            raise UserError(
                f"quant.weight has group_size={self.group_size} and q_groups={self.q_groups}; expected one of the two"
            )
        return self


class ActivationQuantization(Strict):
    enabled: bool = True
    num_bits: Literal[8] = 8
    q_type: Literal["symmetric"] = "symmetric"


NO_ROUNDING = ActivationQuantization(enabled=False)


class FlatGroups(Strict):
    """DeepSpeed's MoQ: `groups` equal chunks of each flattened matrix, twice as many in the MLP's if
    `mlp_extra_grouping`.
    """

    groups: int = Field(ge=1)
    mlp_extra_grouping: bool = False


class Quantization(Strict):
    """How the matrices of the layers are stored. The last three options are labkit's own.

    weight: see `WeightQuantization`.
    activation: kernels may round activations to 8 bits, with a scale for at most 128 of them; without it they keep 16.
    lm_head: quantises the LM head too, in the same way (True) or as given.
    flat: DeepSpeed's `quantization_setting`.
    as_stored: keeps the codes of a GGUF file, which is the default for a GGUF file when no dtype is given.
    """

    enabled: bool = True
    weight: WeightQuantization = WeightQuantization()
    activation: ActivationQuantization = NO_ROUNDING
    lm_head: Annotated[bool | WeightQuantization, one_problem("true, false or a dict")] = False
    flat: FlatGroups | None = None
    as_stored: bool = False

    @model_validator(mode="after")
    def _flat_alone(self) -> Self:
        changed = self.weight.q_type != "symmetric" or self.weight.q_groups != 1 or self.weight.group_size is not None
        if self.flat is not None and changed:
            raise UserError("quantization_setting groups the weights in its own way; leave quant.weight's groups out")
        return self

    @property
    def activation_bits(self) -> int:
        return 8 if self.activation.enabled else 16

    def of(self, name: str) -> Scheme | None:
        """How the canonical weight `name` is stored; None: in floating point."""
        if name in LAYER:
            if self.flat is None:
                return Scheme(self.weight)
            return Scheme(self.weight, self.flat.groups * (2 if self.flat.mlp_extra_grouping and name in MLP else 1))
        if name in HEAD and self.lm_head:
            return Scheme(self.weight if self.lm_head is True else self.lm_head)
        return None


@dataclass(frozen=True)
class Scheme:
    """How one matrix is stored. `flat`: number of chunks of the flattened matrix; None: groups within rows."""

    how: WeightQuantization
    flat: int | None = None

    @property
    def bits(self) -> int:
        return self.how.num_bits

    @property
    def asymmetric(self) -> bool:
        return self.how.q_type == "asymmetric"

    def group(self, outputs: int, inputs: int) -> int:
        """The number of inputs that share a scale, in a whole matrix of this shape."""
        if self.how.group_size is not None:
            return self.how.group_size
        in_row = self.how.q_groups if self.flat is None else max(1, self.flat // outputs)
        return group_size(inputs, in_row, self.bits)

    def groups(self, outputs: int, inputs: int) -> int:
        """The number of groups of a row, in a whole matrix of this shape."""
        return ceil_div(inputs, self.group(outputs, inputs))

    @property
    def numbers(self) -> int:
        """Numbers that a group has besides its codes: its scale and, if asymmetric, its minimum."""
        return 2 if self.asymmetric else 1

    def scales(self, weight: Tensor) -> tuple[Tensor, int]:
        """Returns (scales [outputs, groups, 1 or 2], number of inputs that share one) of some whole rows of the matrix;
        with `flat` of all rows.
        """
        if self.flat is not None:
            return flat_scales(weight, self.flat, bits=self.bits)
        group = self.group(*weight.shape)
        return scales_of(weight, group, bits=self.bits, asymmetric=self.asymmetric), group

    def codes(self, weight: Tensor, scales: Tensor, group: int) -> Tensor:
        return codes_of(weight, scales, group, bits=self.bits)


def stored_bytes(shape: tuple[int, ...], dtype: torch.dtype, scheme: Scheme | None) -> int:
    """Bytes of a matrix with its scales, without the padding of a layout. scheme: None: stored in floating point."""
    outputs, inputs = shape
    if scheme is None:
        return outputs * inputs * float_dtype(dtype).itemsize
    scales = scheme.groups(outputs, inputs) * scheme.numbers * SCALE_BYTES
    return outputs * (inputs * scheme.bits // 8 + scales)


def warn_of_coarse_scales(layer: int | None, matrices: Mapping[str, Linear]) -> None:
    """Logs a warning for each quantised matrix with weights so small that float16 has no fine scale for them.

    Below 6e-5, float16 numbers are multiples of 6e-8. A scale is coarse where this step is more than 1 % of it. Scales
    below 1 % of the matrix's largest are ignored, because their weights hardly matter. layer: None outside the layers.
    """
    for name, linear in matrices.items():
        if linear.scales is None:
            continue
        scales = linear.scales.select(2, 0).float().abs()
        largest = float(scales.max())
        if linear.scales.shape[2] == 2:  # scale and minimum
            largest = max(largest, float(linear.scales.select(2, 1).abs().max()) / (1 << linear.bits))
        coarse = scales[(scales > largest * FINE) & (scales < SMALLEST_STEP / FINE)]
        if coarse.numel():
            place = "" if layer is None else f"layer {layer}, "
            log.warning(
                f"{place}{name}: {coarse.numel() / int((scales > 0).sum()):.1%} of its groups have weights so small "
                f"that a scale in float16 is up to {min(1.0, SMALLEST_STEP / float(coarse.min())):.0%} off; to keep "
                "them, pass a floating dtype"
            )


def check_schemes(part: Shard, quant: Quantization) -> None:
    """Raises UserError for groups that do not divide a matrix, and for a cut between ranks that would need groups that
    are smaller than the kernels take.
    """
    shapes, local = part.config.layer_shapes() | part.config.top_shapes(), replace(part, sums_whole=False)
    for name, shape in shapes.items():
        scheme = quant.of(name) if len(shape) == 2 else None
        if scheme is None:
            continue
        outputs, inputs = shape
        if (size := scheme.how.group_size) and inputs % size:
            sizes = f"{', '.join(map(str, GROUP_SIZES[:-1]))} and {GROUP_SIZES[-1]}"
            fitting = [str(choice) for choice in GROUP_SIZES if inputs % choice == 0]
            raise UserError(
                f"group_size={size} does not divide the {inputs} inputs of {name}; expected "
                f"{' or '.join(fitting) or f'no group_size: none of {sizes} divides them'}, or q_groups=1, which makes "
                "a whole row a group"
            )
        if scheme.flat is None and scheme.how.group_size is None:
            _check_groups(name, inputs, scheme)
        if scheme.flat is not None:
            try:
                check_flat(outputs, inputs, scheme.flat, scheme.bits)
            except UserError as error:
                raise UserError(f"quantization_setting: {name}: {error}") from None
            if quant.flat and quant.flat.mlp_extra_grouping and name in MLP:
                _check_extra(name, outputs, inputs)
        cut = local.cut(name) if name in SUMMED else None
        if cut is not None:
            ((begin, end),) = cut.ranges
            group = scheme.group(outputs, inputs)
            cut_groups(begin, end, group, scheme.groups(outputs, inputs), scheme.bits)


def _check_groups(name: str, inputs: int, scheme: Scheme) -> None:
    """Raises UserError unless the rows of a matrix can be cut into `q_groups`."""

    def divides(groups: int) -> bool:
        return inputs % groups == 0 and ceil_div(inputs, group_size(inputs, groups, scheme.bits)) == groups

    q_groups = scheme.how.q_groups
    if not divides(q_groups):
        most = inputs // FINEST[scheme.bits] + 1
        fitting = [groups for groups in range(1, most + 1) if divides(groups)]
        raise UserError(
            f"q_groups={q_groups} does not divide the {inputs} inputs of {name} into groups of {FINEST[scheme.bits]} "
            f"or more; expected one of {', '.join(map(str, fitting))}"
        )


def _check_extra(name: str, outputs: int, inputs: int) -> None:
    if 4 * min(outputs, inputs) != max(outputs, inputs):
        raise UserError(
            f"mlp_extra_grouping doubles the groups of matrices whose sides are 4 to 1, and {name} is [{outputs}, "
            f"{inputs}]; DeepSpeed would silently not double its groups: leave mlp_extra_grouping out"
        )
