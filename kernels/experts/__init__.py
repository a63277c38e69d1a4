"""A mixture of experts: routed rows pass the MLPs that were chosen for them."""

from ctypes import byref
from functools import partial

import torch
from torch import Tensor

from .. import build, gpu
from ..build import INT, LONG, POINTER
from ..checks import ArgumentCheck, checked, floats
from ..dispatch import choose
from ..types import pointer
from . import reference
from .mlps import ExpertMlps, expert_mlps

__all__ = ["ExpertMlps", "experts"]

build.declare("labkit_experts", *[POINTER] * 4, LONG, LONG, POINTER, INT, allocates=True)

ROWS_AT_ONCE = 2048  # in one call of C++: its working memory grows with the rows


def _chosen(name: str, chosen: Tensor, call: ArgumentCheck) -> None:
    call.tensor(name, chosen, torch.int64, "rows", "choices")
    call.within(name, chosen, call.sizes["experts"] + 1, "the number of experts stands for none")


@checked(weights=expert_mlps, hidden=floats("rows", "width"), chosen=_chosen, shares=floats("rows", "choices"))
def experts(
    hidden: Tensor, chosen: Tensor, shares: Tensor, weights: ExpertMlps, *, threads: int = 1, impl: str
) -> Tensor:
    """The sum over a row's choices of share * MLP(row), [N, outputs] float32.

    hidden [N, H] float32. chosen [N, K] int64: the numbers of the experts; the number of experts itself stands for no
    expert. shares [N, K] float32: their weights.

    A row's sum is in the order of the experts' numbers.
    """
    cpp = partial(_cpp, threads=threads)
    run = choose("experts", impl, reference=reference.experts, cpp=cpp, triton=_triton)
    return run(hidden, chosen, shares, weights)


def _cpp(hidden: Tensor, chosen: Tensor, shares: Tensor, weights: ExpertMlps, *, threads: int) -> Tensor:
    out = torch.empty(len(hidden), weights.outs[0].outputs)
    run = build.in_use(weights.regions[0].up.weight_type).labkit_experts
    for begin in range(0, len(hidden), ROWS_AT_ONCE):
        part = slice(begin, begin + ROWS_AT_ONCE)
        rows, per_row = chosen[part].shape
        run(
            byref(weights.c),
            *map(pointer, (hidden[part], chosen[part], shares[part])),
            rows,
            per_row,
            pointer(out[part]),
            threads,
        )
    return out


def _triton(hidden: Tensor, chosen: Tensor, shares: Tensor, weights: ExpertMlps) -> Tensor:
    gpu.require()
    from .triton_impl import experts as run

    out = torch.empty(len(hidden), weights.outs[0].outputs, device=hidden.device)
    return run(hidden, chosen, shares, weights, out, gpu.default_launcher())
