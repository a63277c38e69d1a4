"""The choice of experts: attention bias + residual + norm + a logit for each expert + the largest of them."""

from ctypes import byref
from functools import partial

import torch
from torch import Tensor

from .. import build, gpu
from ..build import LONG, POINTER
from ..checks import checked, floats, maybe
from ..dispatch import choose
from ..types import pointer
from . import reference
from .router import Router, router_weights

__all__ = ["Router", "route"]

build.declare("labkit_route", *[POINTER] * 6, LONG, *[POINTER] * 4, build.INT, allocates=True)


@checked(
    router=router_weights,
    hidden=floats("rows", "width"),
    addend=maybe(floats("rows", "width")),
    addend_bias=maybe(floats("width")),
)
def route(
    hidden: Tensor,
    addend: Tensor | None,
    addend_bias: Tensor | None,
    router: Router,
    *,
    threads: int = 1,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, addend [N, H] float32 -> (normed [N, H], residual [N, H], chosen [N, K] int64, shares [N, K] float32).

    residual = hidden + addend_norm(addend + addend_bias); normed = norm(residual), rounded to the type of the rows that
    the experts multiply. The experts of a row are in the order of their scores, with the choice bias. If a logit of a
    row is NaN, so are its shares. impl: "cpp" or "reference".
    """
    cpp = partial(_cpp, threads=threads)
    run = choose("route", impl, reference=reference.route, cpp=cpp, triton=_triton)
    return run(hidden, addend, addend_bias, router)


def _cpp(
    hidden: Tensor, addend: Tensor | None, addend_bias: Tensor | None, router: Router, *, threads: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, normed, residual = len(hidden), torch.empty_like(hidden), torch.empty_like(hidden)
    chosen, shares = torch.empty(rows, router.chosen, dtype=torch.int64), torch.empty(rows, router.chosen)
    library = build.in_use(router.matrix.weight_type)
    library.labkit_route(
        byref(router.c),
        byref(router.norm.c),
        byref(router.addend_norm.c),
        *map(pointer, (hidden, addend, addend_bias)),
        rows,
        *map(pointer, (normed, residual, chosen, shares)),
        threads,
    )
    return normed, residual, chosen, shares


def _triton(
    hidden: Tensor, addend: Tensor | None, addend_bias: Tensor | None, router: Router
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gpu.require()
    from .triton_impl import route as run

    return run(hidden, addend, addend_bias, router, gpu.default_launcher())
