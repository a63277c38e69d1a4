"""Functions that transformers' modules call beside their linears and norms, on labkit's kernels.

A module gets a forward with other functions in the places of its own, so that other models of its class keep theirs. A
run on a few tokens, and one more after them, shows what the functions are called with, and each replacement has to
return the same there.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from labkit.engine.alterations import changed_code
from labkit.engine.injected.modules import FAR
from labkit.engine.team_size import team_size
from labkit.kernels.checks import FLOATS, unchecked
from labkit.kernels.linear_attention import conv_step as checked_conv_step
from labkit.kernels.linear_attention import delta_step as checked_delta_step
from labkit.models.observed.calls import distance
from labkit.models.observed.example_inputs import evaluating, next_inputs, token_inputs
from labkit.system.errors import UserError

conv_step, delta_step = unchecked(checked_conv_step), unchecked(checked_delta_step)
Function = Callable[..., Any]


def conv_update(original: Function) -> Function:
    """The causal convolution of one token, with its state."""

    def causal_conv1d_update(
        hidden_states: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Any = None
    ) -> Any:
        stored = (conv_state, weight) if bias is None else (conv_state, weight, bias)
        of_one_type = {tensor.dtype for tensor in stored} <= {conv_state.dtype} & set(FLOATS)
        if (
            hidden_states.shape[-1] != 1
            or activation not in (None, "silu", "swish")
            or not (of_one_type and all(map(_plain, stored)))
        ):
            return original(hidden_states, conv_state, weight, bias, activation)
        x = hidden_states[..., 0].float().contiguous()
        out = conv_step(x, conv_state, weight, bias, activation is not None, threads=team_size(), impl="cpp")
        return out[..., None].to(hidden_states.dtype)

    return causal_conv1d_update


def recurrent_delta_rule(original: Function) -> Function:
    """The gated delta rule of one token, with its state."""

    def torch_recurrent_gated_delta_rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **others: Any,
    ) -> Any:
        if query.shape[1] != 1 or initial_state is None or others.get("cu_seqlens") is not None or query.requires_grad:
            kept = (initial_state, output_final_state, use_qk_l2norm_in_kernel)
            return original(query, key, value, g, beta, *kept, **others)
        q, k, v, log_decay, rate = (tensor[:, 0].float().contiguous() for tensor in (query, key, value, g, beta))
        state = initial_state.float().contiguous()
        out, state = delta_step(
            q, k, v, log_decay, rate, state, use_qk_l2norm_in_kernel, threads=team_size(), impl="cpp"
        )
        return out[:, None].to(query.dtype), state if output_final_state else None

    return torch_recurrent_gated_delta_rule


SERVED: Mapping[str, Callable[[Function], Function]] = {
    "causal_conv1d_update": conv_update,
    "torch_recurrent_gated_delta_rule": recurrent_delta_rule,
}


def replace_functions(model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    """Replaces the functions of a model's modules in place. Yields the name of each and the path of its module."""
    originals = {path: functions for path, module in model.named_modules() if (functions := _functions_of(module))}
    if not originals:
        return
    proven = _proven(model, originals)
    for path, functions in originals.items():
        served = {name: SERVED[name](original) for name, original in functions.items() if (path, name) in proven}
        if served:
            _call_instead(model.get_submodule(path), served)
            yield from ((name, path) for name in served)


def _functions_of(module: nn.Module) -> dict[str, Function]:
    """The functions in SERVED that a module's own forward calls, by name."""
    forward = inspect.unwrap(type(module).forward)
    if not isinstance(forward, FunctionType) or "forward" in vars(module) or changed_code(module):
        return {}
    return {name: forward.__globals__[name] for name in SERVED if name in forward.__code__.co_names}


def _call_instead(module: nn.Module, functions: Mapping[str, Function]) -> None:
    """Gives a module its class's forward, which now calls these functions."""
    plain = inspect.unwrap(type(module).forward)
    forward = FunctionType(
        plain.__code__, {**plain.__globals__, **functions}, plain.__name__, plain.__defaults__, plain.__closure__
    )
    forward.__kwdefaults__ = plain.__kwdefaults__
    module.forward = MethodType(forward, module)


def _proven(model: PreTrainedModel, originals: Mapping[str, Mapping[str, Function]]) -> set[tuple[str, str]]:
    """The paths and names of the functions whose replacements return what they return, in a run with a cached step."""
    calls: Counter[tuple[str, str]] = Counter()
    wrong: set[tuple[str, str]] = set()

    def compared(path: str, name: str, original: Function) -> Function:
        served = SERVED[name](original)

        def both(*args: Any, **kwargs: Any) -> Any:
            own = [*map(_copy, args)], {key: _copy(value) for key, value in kwargs.items()}
            mine, result = served(*own[0], **own[1]), original(*args, **kwargs)
            pairs = [*zip(_tensors(mine), _tensors(result), strict=True)]  # with what changed in place
            pairs += zip(_tensors([*own[0], *own[1].values()]), _tensors([*args, *kwargs.values()]), strict=True)
            calls[path, name] += 1
            if any(
                a.shape != b.shape or a.dtype != b.dtype or distance(a, b) > FAR.get(b.dtype, 0.0) for a, b in pairs
            ):
                wrong.add((path, name))
            return result

        return both

    for path, functions in originals.items():
        compare = {name: compared(path, name, original) for name, original in functions.items()}
        _call_instead(model.get_submodule(path), compare)
    try:
        with suppress(RuntimeError, TypeError, ValueError, UserError), evaluating(model):
            inputs = token_inputs(model)
            following = next_inputs(model, inputs, model(**inputs, use_cache=True))
            if following is not None:
                model(**following, use_cache=True)
    finally:
        for path in originals:
            del model.get_submodule(path).forward
    return set(calls) - wrong


def _tensors(values: Any) -> list[Tensor]:
    several = values if isinstance(values, list | tuple) else [values]
    return [value for value in several if isinstance(value, Tensor)]


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _plain(tensor: Tensor) -> bool:
    """Whether a kernel can read and write a tensor in place."""
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not (tensor.requires_grad and torch.is_grad_enabled())
    )
