"""The calls of a model's modules in one run on a few tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_outputs import ModelOutput
from transformers.pytorch_utils import Conv1D

from labkit.models.observed.example_inputs import evaluating, token_inputs

SCALES = (0.01, 1.0, 30.0, 1000.0)  # of the inputs on which modules are compared: a clamp shows on large ones alone
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}  # between two orders of the same operations
Hook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]


@dataclass(frozen=True)
class ObservedCall:
    """A call of a module.

    read, returned: the first tensors among its arguments and results themselves, so that others that read the same
    tensor are recognised.
    version: the number of changes of `read` before the call.
    x, y: copies of both.
    alone: whether there was no other argument, and no other result.
    others: the other tensors among its arguments.
    """

    read: Tensor
    version: int
    x: Tensor
    returned: Tensor
    y: Tensor
    alone: bool
    others: tuple[Tensor, ...] = ()

    def reads_as(self, other: ObservedCall) -> bool:
        """Whether both read the same tensor with the same content."""
        return self.read is other.read and self.version == other.version

    def follows(self, other: ObservedCall) -> bool:
        """Whether this call read what the other one returned, or a view of it with the same content."""
        return self.read is other.returned or (self.x.shape == other.y.shape and torch.equal(self.x, other.y))


def matrix(linear: nn.Module) -> Tensor:
    """The weight of a linear as [outputs, inputs]; transformers' Conv1D stores [inputs, outputs]."""
    weight: Tensor = linear.weight  # type: ignore[assignment]
    return weight.detach().T if isinstance(linear, Conv1D) else weight.detach()


def bias_of(linear: nn.Module) -> Tensor | None:
    """The bias of a linear; None: it has none."""
    bias: Tensor | None = linear.bias  # type: ignore[assignment]
    return None if bias is None else bias.detach()


def is_linear(module: nn.Module) -> bool:
    """Whether a module computes a linear and nothing else: a linear of torch or transformers, or one of a derived class
    whose outputs are the same on inputs of all sizes.
    """
    if type(module) in (nn.Linear, Conv1D):
        return True
    if not isinstance(module, nn.Linear | Conv1D) or set(dict(module.named_parameters())) - {"weight", "bias"}:
        return False
    weight, bias = matrix(module), module.bias
    if weight.is_meta or weight.dtype not in ROUNDING:
        return False
    x = torch.randn(2, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    with torch.no_grad(), suppress(RuntimeError, TypeError, ValueError):  # of a forward with other arguments
        ways = [(module(x * scale), functional.linear(x * scale, weight, bias)) for scale in SCALES]
        return all(isinstance(y, Tensor) and distance(y, expected) <= ROUNDING[y.dtype] for y, expected in ways)
    return False


def version_of(tensor: Tensor) -> int:
    """The number of changes of a tensor; 0 for tensors of inference mode, which do not count them."""
    return 0 if tensor.is_inference() else tensor._version


def tensors_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The arguments of a call that are tensors."""
    return [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]


def calls_of(model: nn.Module, modules: Mapping[str, nn.Module]) -> dict[str, ObservedCall]:
    """The first call of each of these modules in one run, by path and in running order. Modules that are not called, or
    take or return no tensor, are left out.
    """
    calls: dict[str, ObservedCall | None] = {}
    begun: dict[str, tuple[Tensor, int, Tensor, bool, tuple[Tensor, ...]]] = {}

    def before(path: str) -> Hook:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if path in calls:
                return
            calls[path] = None
            if tensors := tensors_in(args, kwargs):
                read, *others = tensors
                copies = tuple(tensor.clone() for tensor in others)
                begun[path] = (read, version_of(read), read.clone(), len(args) + len(kwargs) == 1, copies)

        return hook

    def after(path: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple | list | ModelOutput) and len(output) else output
            if path in begun and isinstance(first, Tensor):
                read, version, x, alone, others = begun.pop(path)
                calls[path] = ObservedCall(read, version, x, first, first.clone(), alone and first is output, others)

        return hook

    handles = [
        handle
        for path, module in modules.items()
        for handle in (
            module.register_forward_pre_hook(before(path), with_kwargs=True),
            module.register_forward_hook(after(path)),
        )
    ]
    try:
        with evaluating(model):
            model(**token_inputs(model))
    finally:
        for handle in handles:
            handle.remove()
    return {path: call for path, call in calls.items() if call is not None}


def distance(actual: Tensor, expected: Tensor) -> float:
    """Root of the mean square difference relative to that of the expected tensor; infinite where one of the two is not
    finite and the other one is.
    """
    actual, expected = actual.detach().double(), expected.detach().double()
    finite = expected.isfinite()
    if not torch.equal(finite, actual.isfinite()):
        return float("inf")
    if not bool(finite.any()):
        return 0.0
    size = expected[finite].square().mean().sqrt()
    return float((actual - expected)[finite].square().mean().sqrt() / size.clamp_min(torch.finfo(torch.float64).tiny))
