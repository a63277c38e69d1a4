"""A norm of rows alone, for models of which only parts run on the kernels."""

from ctypes import byref
from functools import partial

import torch
from torch import Tensor

from .. import build
from ..build import INT, LONG, POINTER
from ..checks import checked, floats, maybe, norm
from ..dispatch import choose
from ..types import Norm, pointer
from .reference import norm_rows as reference

__all__ = ["norm_rows"]

build.declare("labkit_norm_rows", *[POINTER] * 3, LONG, LONG, POINTER, INT, allocates=True)


@checked(x=floats("rows", "width"), norm=norm, gate=maybe(floats("rows", "width")))
def norm_rows(x: Tensor, norm: Norm, gate: Tensor | None = None, *, threads: int = 1, impl: str) -> Tensor:
    """[N, H] float32 -> norm(x) [N, H], or norm(x) * silu(gate)."""
    run = choose("norm_rows", impl, reference=reference, cpp=partial(_cpp, threads=threads))
    return run(x, norm, gate)


def _cpp(x: Tensor, norm: Norm, gate: Tensor | None, *, threads: int) -> Tensor:
    out = torch.empty_like(x)
    build.any_library().labkit_norm_rows(
        pointer(x), byref(norm.c), pointer(gate), x.shape[0], x.shape[1], pointer(out), threads
    )
    return out
