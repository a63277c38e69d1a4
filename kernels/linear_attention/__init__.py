"""One token of linear attention, for models of which only parts run on the kernels: the causal convolution over the
last tokens, and the gated delta rule (Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks", equation 10).
"""

from functools import partial

import torch
from torch import Tensor

from labkit.system.errors import UserError

from .. import build
from ..build import INT, LONG, POINTER
from ..checks import FLOATS, ArgumentCheck, checked, flag, floats, maybe
from ..dispatch import choose
from ..types import pointer
from . import reference

__all__ = ["conv_step", "delta_step"]

build.declare("labkit_conv_step", *[POINTER] * 4, *[LONG] * 4, INT, INT, POINTER, INT, allocates=True)
build.declare("labkit_delta_step", *[POINTER] * 6, *[LONG] * 5, INT, POINTER, POINTER, INT, allocates=True)


def _state(name: str, state: Tensor, call: ArgumentCheck) -> None:
    call.tensor(name, state, FLOATS, "batch", "channels", "kept")
    call.later_dtypes = (state.dtype,)


def _weight(name: str, weight: Tensor, call: ArgumentCheck) -> None:
    call.tensor(name, weight, call.later_dtypes, "channels", "taps")
    if call.sizes["taps"] > call.sizes["kept"] + 1:
        raise UserError(
            f"{name}: got {call.sizes['taps']} taps for a state of {call.sizes['kept']} tokens, "
            "expected at most one more"
        )


def _bias(name: str, bias: Tensor, call: ArgumentCheck) -> None:
    call.tensor(name, bias, call.later_dtypes, "channels")


def _key_heads(name: str, k: Tensor, call: ArgumentCheck) -> None:
    call.tensor(name, k, torch.float32, "batch", "key heads", "keys")
    if call.sizes["heads"] % call.sizes["key heads"]:
        raise UserError(
            f"{name}: got {call.sizes['key heads']} heads for {call.sizes['heads']} heads of values, expected a divisor"
        )


@checked(x=floats("batch", "channels"), state=_state, weight=_weight, bias=maybe(_bias), silu=flag)
def conv_step(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, *, threads: int = 1, impl: str
) -> Tensor:
    """x [B, C] float32 -> the causal convolution at this token [B, C] float32, then SiLU if `silu`.

    state [B, C, S]: the last S tokens; x is appended, and the oldest one dropped, in place. weight [C, K], K <= S + 1,
    and bias [C] or None have the type of the state.
    """
    run = choose("conv_step", impl, reference=reference.conv_step, cpp=partial(_conv_cpp, threads=threads))
    return run(x, state, weight, bias, silu)


@checked(
    v=floats("batch", "heads", "values"),
    k=_key_heads,
    q=floats("batch", "key heads", "keys"),
    log_decay=floats("batch", "heads"),
    beta=floats("batch", "heads"),
    state=floats("batch", "heads", "keys", "values"),
    normed=flag,
)
def delta_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor,
    normed: bool,
    *,
    threads: int = 1,
    impl: str,
) -> tuple[Tensor, Tensor]:
    """The output of each head [B, H, V], and the next state [B, H, K, V], all in float32.

    q, k [B, Hk, K]: each serves H / Hk consecutive heads; normed: they are divided by their lengths first. v [B, H, V];
    log_decay, beta [B, H].

    state' = exp(log_decay) state + k beta (v - k exp(log_decay) state), and the output is q state' / sqrt(K).
    """
    run = choose("delta_step", impl, reference=reference.delta_step, cpp=partial(_delta_cpp, threads=threads))
    return run(q, k, v, log_decay, beta, state, normed)


def _conv_cpp(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, *, threads: int) -> Tensor:
    out = torch.empty_like(x)
    build.any_library().labkit_conv_step(
        pointer(x),
        pointer(state),
        pointer(weight),
        pointer(bias),
        *state.shape,
        weight.shape[1],
        FLOATS.index(state.dtype),
        silu,
        pointer(out),
        threads,
    )
    return out


def _delta_cpp(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, normed: bool, *, threads: int
) -> tuple[Tensor, Tensor]:
    out, following = torch.empty_like(v), torch.empty_like(state)
    build.any_library().labkit_delta_step(
        *map(pointer, (q, k, v, log_decay, beta, state)),
        k.shape[0],
        k.shape[1],
        *state.shape[1:],
        normed,
        pointer(following),
        pointer(out),
        threads,
    )
    return out, following
