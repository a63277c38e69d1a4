"""Refusals of models that a user changed in other ways than the weights: kernels compute what the config says."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as modules
from transformers import PreTrainedModel

from labkit.engine.configured import configured, differences
from labkit.kernels.mlp_gemm.reference import ACTIVATION
from labkit.models.config import ModelConfig
from labkit.models.policy import Policy
from labkit.system.errors import UserError

LIBRARIES = ("torch", "transformers")  # their modules compute what a config says
WATCHING = ("labkit", "transformers")  # their hooks change nothing
LARGE = torch.logspace(0, 5, 51)  # a clipped activation differs only beyond its bounds
POINTS = torch.cat((-LARGE, torch.linspace(-4, 4, 160), LARGE))
ROUNDING = 1e-4  # between formulas of the same activation; GELU and its approximation by tanh are 4e-4 apart


def refuse_alterations(model: PreTrainedModel, policy: Policy, config: ModelConfig) -> None:
    """Raises UserError with the name of a module or attribute if the engine would compute something else than the
    model.

    Checks for forward hooks of modules and global ones, a replaced `forward`, classes from outside torch and
    transformers, and activations, attributes and tables that differ from the config. Only the layers of an encoder are
    checked, because the engine keeps everything else.
    """
    root = model if config.causal else model.base_model
    start = "" if config.causal else policy.layers.split(".")[0]
    if hook := _foreign_hook(modules._global_forward_hooks, modules._global_forward_pre_hooks):
        raise _refused("torch.nn.Module", f"has the global forward hook {hook}", "remove the hook")
    for path, module in root.get_submodule(start).named_modules(prefix=start):
        if change := changed_code(module):
            raise _refused(path or type(model).__name__, change)
    for path, module in root.get_submodule(policy.layers).named_modules(prefix=policy.layers):
        if f"{policy.within_layer(path)}.weight" in dict(policy.filled):  # a norm without weights
            continue
        if change := _changed_activation(module, config):
            raise _refused(path, change)
    for name, change in differences(root, configured(root)):
        if name.startswith(start):
            raise _refused(name, change, "undo the change, or change the config and load the model anew")


def _refused(path: str, change: str, remedy: str = "undo the change") -> UserError:
    return UserError(
        f"{path} {change}, which the kernels would leave out; they compute what the model's config says: {remedy}, or "
        "run the model as it is, without init_inference"
    )


def changed_code(module: nn.Module) -> str | None:
    """What makes a module compute something else than its class in torch or transformers, in words; None: nothing."""
    kind = type(module)
    if _library(kind) not in LIBRARIES:
        return f"is a {kind.__name__} of {kind.__module__}"
    if _library(kind.forward) not in LIBRARIES or not _is_own(module):
        return "has a forward that replaces its own"
    hook = _foreign_hook(module._forward_hooks, module._forward_pre_hooks)
    return f"has the forward hook {hook}" if hook else None


def _is_own(module: nn.Module) -> bool:
    """Tells whether a module's `forward` is its class's, compiled or not. accelerate's wrapper keeps it under another
    name, and calls hooks before and after it.
    """
    forward = vars(module).get("forward")
    if "_old_forward" in vars(module):
        if _library(forward) != "accelerate" or not _is_accelerates(getattr(module, "_hf_hook", None)):
            return False
        forward = module._old_forward
    compiled = getattr(forward, "_torchdynamo_orig_callable", forward)
    wrapper = "_orig_mod" in module._modules  # made by torch.compile; the wrapped module is checked, too
    return forward is None or wrapper or getattr(compiled, "__func__", None) is type(module).forward


def _foreign_hook(*hooks: Mapping[int, Any]) -> str | None:
    """Returns the name of the first hook that may change what a module computes."""
    hook = next((hook for hook in chain(*(kind.values() for kind in hooks)) if _library(hook) not in WATCHING), None)
    return None if hook is None else getattr(hook, "__qualname__", type(hook).__name__)


def _is_accelerates(hook: Any) -> bool:
    """Tells whether a hook of accelerate, or a sequence of them, has accelerate's own types: they move tensors."""
    return all(_library(type(part)) == "accelerate" for part in (hook, *getattr(hook, "hooks", ())))


def _library(code: Any) -> str:
    """Returns the name of the library that defines a class, a hook or a `forward`. A function that `functools.wraps`
    another has the other's `__module__`, but its own globals.
    """
    function = code.func if isinstance(code, partial) else code
    of_function = getattr(function, "__globals__", {}).get("__name__")
    return str(of_function or getattr(function, "__module__", "")).partition(".")[0]


def _changed_activation(module: nn.Module, config: ModelConfig) -> str | None:
    """Compares an activation (a module without weights, or a sequence of them) with the config's activation. Dropout
    and Identity do nothing after training.
    """
    has_parts = next(module.children(), None) is not None and not isinstance(module, nn.Sequential)
    if isinstance(module, nn.Dropout | nn.Identity) or has_parts:
        return None
    if next(module.parameters(), None) is not None:
        return None
    with torch.no_grad():
        output, expected = module(POINTS), ACTIVATION[config.activation](POINTS)
    same = output.shape == expected.shape and torch.allclose(output, expected, atol=ROUNDING)
    return None if same else f"computes {type(module).__name__} (the config's activation: {config.activation})"
