"""The weights of a choice of experts, and their check."""

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from labkit.system.errors import UserError

from ..abi import CRouter
from ..checks import ArgumentCheck, flag, floats, linear, maybe, norm, record
from ..types import NO_NORM, Linear, Norm, pointer

SCORES = ("softmax", "sigmoid")


@dataclass(frozen=True)
class Router:
    """Chooses the `chosen` experts with the largest scores. Each expert has a logit, which is an output of `matrix`.

    scores: "softmax" of all logits, or the "sigmoid" of each logit.
    choice_bias: [experts] float32, added to the scores for the choice, but not for the shares; None: 0.
    The share of an expert is `factor` times its score. If `renormalised`, the scores of the chosen experts are divided
    by their sum first.
    norm, addend_norm: as in region 3.
    """

    norm: Norm
    matrix: Linear
    chosen: int
    renormalised: bool
    addend_norm: Norm = NO_NORM
    scores: str = "softmax"
    choice_bias: Tensor | None = None
    factor: float = 1.0

    @cached_property
    def c(self) -> CRouter:
        return CRouter(
            self.matrix.c,
            pointer(self.choice_bias),
            self.chosen,
            int(self.renormalised),
            int(self.scores == "sigmoid"),
            self.factor,
        )


def _router(name: str, router: Router, call: ArgumentCheck) -> None:
    linear(f"{name}.matrix", matrix := router.matrix, call)
    norm(f"{name}.norm", router.norm, call)
    norm(f"{name}.addend_norm", router.addend_norm, call)
    flag(f"{name}.renormalised", router.renormalised, call)
    maybe(floats(matrix.outputs))(f"{name}.choice_bias", router.choice_bias, call)
    call.one_of(f"{name}.scores", router.scores, SCORES)
    call.real(f"{name}.factor", router.factor)
    if type(router.chosen) is not int or not 1 <= router.chosen <= matrix.outputs:
        raise UserError(f"got {name}.chosen = {router.chosen!r}, expected 1 to {matrix.outputs}, the number of experts")


router_weights = record(Router, _router)
