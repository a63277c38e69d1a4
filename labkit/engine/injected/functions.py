"""Gives kernels to functions that transformers' modules call beside their linears and norms.

A module gets a forward with other functions in the places of its own, so that other models of its class keep theirs. A
run on a few tokens, and one more after them, shows what the functions are called with, and each kernel has to return
the same there.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from labkit.engine.alterations import changed_code
from labkit.engine.injected.modules import FAR
from labkit.engine.injected.single_tokens import (
    causal_conv1d_update,
    sdpa_attention_forward,
    torch_recurrent_gated_delta_rule,
)
from labkit.models.observed.calls import distance
from labkit.models.observed.example_inputs import evaluating, next_inputs, token_inputs
from labkit.system.errors import UserError

Function = Callable[..., Any]
ATTENTION = "ALL_ATTENTION_FUNCTIONS"
SERVED: Mapping[str, Function] = {
    ATTENTION: sdpa_attention_forward,
    "causal_conv1d_update": causal_conv1d_update,
    "torch_recurrent_gated_delta_rule": torch_recurrent_gated_delta_rule,
}
KINDS = {ATTENTION: "attention"}  # what a replacement is called, where the name does not say it


class AttentionTable:
    """transformers' table of attention functions, with another function in the place of "sdpa"."""

    def __init__(self, original: Any, change: Callable[[Function], Function]) -> None:
        self._original = original
        self._sdpa = change(original["sdpa"])

    def __getitem__(self, name: str) -> Function:
        return self._changed(self._original[name])

    def get_interface(self, name: str, default: Function) -> Function:
        return self._changed(self._original.get_interface(name, default))

    def _changed(self, function: Function) -> Function:
        return self._sdpa if function is self._original["sdpa"] else function

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _changed(name: str, original: Any, change: Callable[[Function], Function]) -> Any:
    """What a forward finds under a name once the function there is changed."""
    return AttentionTable(original, change) if name == ATTENTION else change(original)


def _served(name: str) -> Callable[[Function], Function]:
    """Gives a function a kernel, wherever the kernel takes the arguments."""

    def change(original: Function) -> Function:
        def served(*args: Any, **kwargs: Any) -> Any:
            result = SERVED[name](*args, **kwargs)
            return original(*args, **kwargs) if result is NotImplemented else result

        return served

    return change


def replace_functions(model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    """Replaces the functions of a model's modules in place. Yields the kind of each and the path of its module."""
    originals = {path: functions for path, module in model.named_modules() if (functions := _functions_of(module))}
    if not originals:
        return
    proven = _proven(model, originals)
    for path, functions in originals.items():
        served = {
            name: _changed(name, original, _served(name))
            for name, original in functions.items()
            if (path, name) in proven
        }
        if served:
            _call_instead(model.get_submodule(path), served)
            yield from ((KINDS.get(name, name), path) for name in served)


def _functions_of(module: nn.Module) -> dict[str, Any]:
    """The functions in SERVED that a module's own forward calls, or their table, by name."""
    forward = inspect.unwrap(type(module).forward)
    if not isinstance(forward, FunctionType) or "forward" in vars(module) or changed_code(module):
        return {}
    return {name: forward.__globals__[name] for name in SERVED if name in forward.__code__.co_names}


def _call_instead(module: nn.Module, functions: Mapping[str, Any]) -> None:
    """Gives a module its class's forward, which now calls these functions."""
    plain = inspect.unwrap(type(module).forward)
    forward = FunctionType(
        plain.__code__, {**plain.__globals__, **functions}, plain.__name__, plain.__defaults__, plain.__closure__
    )
    forward.__kwdefaults__ = plain.__kwdefaults__
    module.forward = MethodType(forward, module)


def _proven(model: PreTrainedModel, originals: Mapping[str, Mapping[str, Any]]) -> set[tuple[str, str]]:
    """The paths and names of the functions whose kernels return what they return, in a run with a cached step."""
    calls: Counter[tuple[str, str]] = Counter()
    wrong: set[tuple[str, str]] = set()

    def compared(path: str, name: str, original: Function) -> Function:
        def both(*args: Any, **kwargs: Any) -> Any:
            own = [*map(_copy, args)], {key: _copy(value) for key, value in kwargs.items()}
            mine, result = SERVED[name](*own[0], **own[1]), original(*args, **kwargs)
            if mine is NotImplemented:
                return result
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
        compare = {
            name: _changed(name, original, partial(compared, path, name)) for name, original in functions.items()
        }
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
