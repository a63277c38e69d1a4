"""The weights of a choice of experts, and their check."""

from dataclasses import dataclass
from functools import cached_property

from labkit.system.errors import UserError

from ..abi import CRouter
from ..checks import ArgumentCheck, flag, linear, norm, record
from ..types import NO_NORM, Linear, Norm


@dataclass(frozen=True)
class Router:
    """Chooses the `chosen` experts with the largest logits, one output of `matrix` for each expert.

    The share of an expert is its part of the softmax over all experts, or over the chosen ones if `renormalised`.
    norm, addend_norm: as in region 3.
    """

    norm: Norm
    matrix: Linear
    chosen: int
    renormalised: bool
    addend_norm: Norm = NO_NORM

    @cached_property
    def c(self) -> CRouter:
        return CRouter(self.matrix.c, self.chosen, int(self.renormalised))


def _router(name: str, router: Router, call: ArgumentCheck) -> None:
    linear(f"{name}.matrix", matrix := router.matrix, call)
    norm(f"{name}.norm", router.norm, call)
    norm(f"{name}.addend_norm", router.addend_norm, call)
    flag(f"{name}.renormalised", router.renormalised, call)
    if type(router.chosen) is not int or not 1 <= router.chosen <= matrix.outputs:
        raise UserError(f"got {name}.chosen = {router.chosen!r}, expected 1 to {matrix.outputs}, the number of experts")


router_weights = record(Router, _router)
