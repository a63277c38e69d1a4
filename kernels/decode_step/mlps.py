"""The second half of a layer: an MLP that every row passes, or a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from ..abi import CDenseMlp, CLinear, CMixture, CMlpWeights
from ..expert_store import ExpertsOfLayer
from ..experts import ExpertMlps
from ..route import Router
from ..types import NO_NORM, Linear, MlpWeights, Norm

Move = Callable[[Linear], Linear]
# Canonical names of the matrices of an MLP, and of one in a model whose other layers have experts.
OF_MLP = ("ff1.weight", "ff2.weight")
AMONG_EXPERTS = ("dense_ff1.weight", "dense_ff2.weight")


@dataclass(frozen=True)
class DenseMlp:
    """An MLP whose two matrices every row passes. The bias of `out` is added by the next region."""

    region: MlpWeights  # region 3
    out: Linear
    out_bias: Tensor | None
    out_norm: Norm = NO_NORM  # of the MLP's output, before it is added to the residual
    names: tuple[str, str] = OF_MLP

    @property
    def matrices(self) -> dict[str, Linear]:
        """The matrices by canonical name."""
        return dict(zip(self.names, (self.region.up, self.out), strict=True))

    def with_matrices(self, move: Move) -> DenseMlp:
        return replace(self, region=replace(self.region, up=move(self.region.up)), out=move(self.out))

    def c(self, own_norm: bool) -> CDenseMlp:
        """own_norm: the input has a norm of its own."""
        region = self.region.c
        if not own_norm:
            region = CMlpWeights(NO_NORM.c, region.up, region.activation, region.gated, region.addend_norm)
        return CDenseMlp(region, self.out.c_with(self.out_bias), self.out_norm.c)

    c_mixture = None


@dataclass(frozen=True)
class SharedExpert:
    """An MLP of a mixture that every row passes. gate: its output is multiplied by the sigmoid of this one's only
    output; None: by 1.
    """

    region: MlpWeights  # without norms
    out: Linear
    gate: Linear | None = None


@dataclass(frozen=True)
class MixtureMlp:
    """A mixture of experts.

    own: the experts of this rank, by their numbers. A row's other experts are on other ranks.
    ups, outs: the first, and the second, matrices of all experts, one expert after the other. With layout "panels" each
    expert's rows are padded to whole blocks.
    stored: where the experts' matrices are, if they are not resident. Then `ups` and `outs` have their shapes, but not
    their numbers.
    """

    router: Router
    own: range
    ups: Linear
    outs: Linear
    activation: str
    gated: bool
    hidden: int  # outputs of an expert
    out_norm: Norm = NO_NORM  # of the mixture's output, before it is added to the residual
    shared: SharedExpert | None = None
    stored: ExpertsOfLayer | None = None

    out_bias = None

    @cached_property
    def experts(self) -> ExpertMlps:
        count = len(self.own)
        regions = tuple(MlpWeights(NO_NORM, up, self.activation, self.gated) for up in _parts(self.ups, count))
        return ExpertMlps(regions, tuple(replace(out, outputs=self.hidden) for out in _parts(self.outs, count)))

    @property
    def matrices(self) -> dict[str, Linear]:
        """The matrices by canonical name."""
        matrices = {"router.weight": self.router.matrix, "ff1.weight": self.ups, "ff2.weight": self.outs}
        if (shared := self.shared) is not None:
            matrices |= {"shared_ff1.weight": shared.region.up, "shared_ff2.weight": shared.out}
            if shared.gate is not None:
                matrices["shared_gate.weight"] = shared.gate
        return matrices

    def with_matrices(self, move: Move) -> MixtureMlp:
        shared = self.shared
        if shared is not None:
            region = replace(shared.region, up=move(shared.region.up))
            gate = None if shared.gate is None else move(shared.gate)
            shared = replace(shared, region=region, out=move(shared.out), gate=gate)
        router = replace(self.router, matrix=move(self.router.matrix))
        return replace(self, router=router, ups=move(self.ups), outs=move(self.outs), shared=shared)

    def c(self, own_norm: bool) -> CDenseMlp:
        """The shared expert, with the norms of the mixture."""
        assert own_norm
        router, shared = self.router, self.shared
        region = CMlpWeights() if shared is None else shared.region.c
        region = CMlpWeights(router.norm.c, region.up, region.activation, region.gated, router.addend_norm.c)
        return CDenseMlp(region, CLinear() if shared is None else shared.out.c, self.out_norm.c)

    @cached_property
    def c_mixture(self) -> CMixture:
        gate = None if self.shared is None else self.shared.gate
        return CMixture(self.router.c, self.experts.c, self.own.start, CLinear() if gate is None else gate.c)


def _parts(stack: Linear, count: int) -> list[Linear]:
    """The matrices of a stack. Their tensors are views of its own."""
    none = [None] * count
    weights = stack.weight.chunk(count)
    scales = none if stack.scales is None else stack.scales.chunk(count)
    biases = none if stack.bias is None else stack.bias.chunk(count)
    return [
        replace(stack, weight=weight, scales=scale, bias=bias, outputs=stack.outputs // count)
        for weight, scale, bias in zip(weights, scales, biases, strict=True)
    ]
