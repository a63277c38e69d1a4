"""The MLPs of a mixture of experts."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from labkit.system.errors import UserError

from ..abi import CExpertMlps, CLinear, CMlpWeights
from ..checks import ArgumentCheck, record
from ..mlp_gemm.mlp_checks import mlp_down, mlp_weights
from ..types import Linear, MlpWeights


@dataclass(frozen=True)
class ExpertMlps:
    """MLPs of the same sizes, types and activation, without norms.

    regions: the first matrix of each, with its activation. outs: the second matrix of each.
    """

    regions: tuple[MlpWeights, ...]
    outs: tuple[Linear, ...]

    @cached_property
    def c(self) -> CExpertMlps:
        count = len(self.regions)
        return CExpertMlps(ctypes.addressof(self._c_regions), ctypes.addressof(self._c_outs), count)

    @cached_property
    def _c_regions(self) -> ctypes.Array[CMlpWeights]:
        return (CMlpWeights * len(self.regions))(*(region.c for region in self.regions))

    @cached_property
    def _c_outs(self) -> ctypes.Array[CLinear]:
        return (CLinear * len(self.outs))(*(out.c for out in self.outs))

    @cached_property
    def stacks(self) -> tuple[Linear, Linear]:
        """The first, and the second, matrices of all experts, one below the other, as the Triton kernels read them.

        They are views where the matrices of a model lie so, else copies.
        """
        return _stack([region.up for region in self.regions]), _stack(self.outs)


def _stack(matrices: Sequence[Linear]) -> Linear:
    kinds = {(matrix.layout, matrix.bits, matrix.group, matrix.asymmetric, matrix.bias is None) for matrix in matrices}
    if len(kinds) > 1:
        raise UserError(
            "got experts whose matrices differ in their codes, or of which only some have a bias; the Triton kernels "
            "take experts of one kind"
        )
    first = matrices[0]
    return replace(
        first,
        weight=_joined([matrix.weight for matrix in matrices]),
        bias=None if first.bias is None else _joined([matrix.bias for matrix in matrices if matrix.bias is not None]),
        scales=None
        if first.scales is None
        else _joined([matrix.scales for matrix in matrices if matrix.scales is not None]),
        outputs=len(matrices) * first.outputs,
    )


def _joined(parts: list[Tensor]) -> Tensor:
    first = parts[0]
    memory, begin = first.untyped_storage().data_ptr(), first.storage_offset()
    places = [(part.untyped_storage().data_ptr(), part.storage_offset()) for part in parts]
    if places == [(memory, begin + number * first.numel()) for number in range(len(parts))]:
        return first.as_strided((len(parts) * len(first), *first.shape[1:]), first.stride())
    return torch.cat(parts)


def _expert_mlps(name: str, weights: ExpertMlps, call: ArgumentCheck) -> None:
    """Checks the MLPs, and sets `width`, `outputs` and `experts`."""
    regions, outs = weights.regions, weights.outs
    if not (isinstance(regions, tuple) and isinstance(outs, tuple)) or not 0 < len(regions) == len(outs):
        raise UserError(f"{name}: expected a tuple of regions and a tuple of as many outs, at least one")
    for number, (region, out) in enumerate(zip(regions, outs, strict=True)):
        mlp_weights(f"{name}.regions[{number}]", region, call)
        mlp_down(f"{name}.outs[{number}]", out, call)
        if (region.norm.kind, region.addend_norm.kind) != ("none", "none"):
            raise UserError(f"{name}.regions[{number}]: got a norm, expected none: rows pass several experts")
        if (own := _kind(region, out)) != (first := _kind(regions[0], outs[0])):
            raise UserError(f"{name}: got an expert {number} of {own}, expected {first} as expert 0")
    call.sizes |= {"width": regions[0].up.inputs, "outputs": outs[0].outputs, "experts": len(regions)}


def _kind(region: MlpWeights, out: Linear) -> str:
    """What all experts of a mixture have in common."""
    gate = "gated " if region.gated else ""
    sizes = f"{region.up.inputs} -> {region.up.outputs} -> {out.inputs} -> {out.outputs}"
    return f"{gate}{region.activation} {sizes} in {region.up.weight_type} and {out.weight_type}"


expert_mlps = record(ExpertMlps, _expert_mlps)
