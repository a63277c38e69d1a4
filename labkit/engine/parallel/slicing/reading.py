"""Reading of a block in one run: what each head or feature depends on, and which numbers the forward reads.

The outputs of column-parallel linears, the parameters between the linears and the arguments of their modules are leaves
of autograd. The gradient of a part of a row-parallel linear's input is exactly zero for all that the part does not
depend on.
"""

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from labkit.engine.parallel.slicing.linear import is_linear
from labkit.engine.parallel.slicing.recording import Call, is_float
from labkit.engine.parallel.slicing.shares import Owners
from labkit.engine.parallel.slicing.sliced import child

Axis = tuple[Any, int]  # of a column's output, a parameter (by name) or an argument (by module and key); from the last
Reach = dict[Axis, Tensor]  # indices of an axis that something depends on
Number = tuple[str, str, bool]  # module, name, whether it belongs to the module's config


@dataclass(frozen=True)
class Reading:
    """One run of a block. columns: outputs, as leaves. arguments: by module and key, as leaves. rows: inputs."""

    block: nn.Module
    columns: dict[str, list[Tensor]] = field(default_factory=dict)
    arguments: dict[tuple[str, int | str], Tensor] = field(default_factory=dict)
    rows: dict[str, list[Tensor]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, block: nn.Module, call: Call, columns: Sequence[str], rows: Sequence[str], modules: Sequence[str]
    ) -> "Reading":
        """Runs the block. modules: those with arguments that may be tables per head."""
        reading = cls(block)
        generator = torch.Generator().manual_seed(0)

        def set_output(name: str, module: nn.Module, args: Any, output: Tensor) -> Tensor:
            # small positive values pass through every activation function, and saturate none
            leaf = (torch.rand(output.shape, generator=generator) / 5).to(output.device).requires_grad_()
            reading.columns.setdefault(name, []).append(leaf)
            return leaf.clone()  # the forward may change it in place

        def set_arguments(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            def leaf(key: int | str, value: Any) -> Any:
                if not is_float(value) or (name, key) in reading.arguments:
                    return value
                reading.arguments[name, key] = value.detach().clone().requires_grad_()
                return reading.arguments[name, key].clone()

            return tuple(leaf(*item) for item in enumerate(args)), {key: leaf(key, kwargs[key]) for key in kwargs}

        def keep_input(name: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
            reading.rows.setdefault(name, []).append(args[0])

        for _, parameter in tables(block, ""):
            parameter.requires_grad_()
        with ExitStack() as stack, torch.enable_grad():
            for name in dict.fromkeys(modules):
                hook = partial(set_arguments, name)
                stack.enter_context(block.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True))
            for name in dict.fromkeys(columns):
                stack.enter_context(block.get_submodule(name).register_forward_hook(partial(set_output, name)))
            for name in rows:
                stack.enter_context(block.get_submodule(name).register_forward_pre_hook(partial(keep_input, name)))
            block(*call.args, **call.kwargs)
        return reading

    def flow(self, row: str, columns: Sequence[str], module: str) -> "Flow":
        """Returns what the row's input may depend on: outputs of its columns, parameters and arguments of `module`."""
        outputs = [(name, tensor) for name in columns for tensor in self.columns[name]]
        arguments = [(key, tensor) for key, tensor in self.arguments.items() if key[0] == module]
        return Flow(self.rows[row], outputs, [*tables(self.block, module), *arguments])


def tables(block: nn.Module, module: str) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields the parameters in a module of the block. Parameters of linears are left out."""
    for name, part in block.get_submodule(module).named_modules():
        for own, parameter in () if is_linear(part) else part.named_parameters(recurse=False):
            yield child(module, child(name, own)), parameter


@dataclass(frozen=True)
class Flow:
    """Values that the input of a row-parallel linear is computed from."""

    inputs: list[Tensor]
    outputs: list[tuple[str, Tensor]]  # of column-parallel linears
    tables: list[tuple[Any, Tensor]]  # parameters and arguments

    @property
    def features(self) -> int:
        return self.inputs[0].shape[-1]

    def reach(self, parts: Sequence[range], *, of_outputs: bool = False) -> Reach:
        """Returns what the parts of the input features depend on."""
        leaves = self.outputs if of_outputs else [*self.outputs, *self.tables]
        inputs = [value for value in self.inputs if value.requires_grad]
        weights = [torch.zeros_like(value) for value in inputs]
        generator = torch.Generator().manual_seed(0)
        for weight, part in itertools.product(weights, parts):
            some = weight[..., part.start : part.stop]
            some.copy_(torch.randn(some.shape, generator=generator))
        gradients: Sequence[Tensor | None] = [None] * len(leaves)
        if inputs:
            of_leaves = [tensor for _, tensor in leaves]
            gradients = torch.autograd.grad(inputs, of_leaves, weights, retain_graph=True, allow_unused=True)
        reach: Reach = {}
        for place, ((name, tensor), gradient) in enumerate(zip(leaves, gradients, strict=True)):
            # calls of one linear may have other axes before the features
            for axis in (-1,) if place < len(self.outputs) else range(-tensor.ndim, 0):
                needed = torch.zeros(tensor.shape[axis], dtype=torch.bool)
                if gradient is not None:
                    needed = (gradient != 0).movedim(axis, 0).reshape(len(needed), -1).any(1).cpu()
                reach[name, axis] = needed | reach.get((name, axis), needed)
        return reach

    def _outputs(self, part: range) -> Tensor:
        return torch.cat(list(self.reach([part], of_outputs=True).values()))

    def head_size(self) -> int:
        """Returns how many consecutive features depend on the same outputs; 1: all are computed apart."""
        if self.features == 1:
            return 1
        shared = self._outputs(range(1)) & self._outputs(range(1, 2))
        if not shared.any():
            return 1
        return _smallest_divisor(
            self.features, lambda size: bool((shared & ~self._outputs(range(size, size + 1))).any())
        )

    def group_size(self, parts: Sequence[range]) -> int:
        """Returns how many consecutive parts depend in part on the same outputs."""
        first = self._outputs(parts[0])
        return _smallest_divisor(len(parts), lambda size: not (first & self._outputs(parts[size])).any())

    def owners(self, parts: Sequence[range], group: int) -> dict[Axis, Owners]:
        """Returns the owners of all axes that the parts depend on, for groups of equal size."""
        groups = self._numbers(parts, [part // group for part in range(len(parts))])
        places = self._numbers(parts, [part % group for part in range(len(parts))])
        return {axis: Owners(groups[axis], places[axis]) for axis in groups}

    def _numbers(self, parts: Sequence[range], numbers: Sequence[int]) -> Reach:
        """Returns the number of the part that depends on each index, read bit by bit; -1: parts of several numbers, or
        none.
        """
        found = {axis: needed.long() - 1 for axis, needed in self.reach(parts).items() if needed.any()}
        for bit in range(max(numbers).bit_length()):
            sets = [
                [part for part, number in zip(parts, numbers, strict=True) if number >> bit & 1 == v] for v in (0, 1)
            ]
            zeros, ones = map(self.reach, sets)
            for axis, number in found.items():
                clear = (zeros[axis] ^ ones[axis]) & (number >= 0)
                found[axis] = torch.where(clear, number + (ones[axis].long() << bit), -1)
        return found


def _smallest_divisor(count: int, is_enough: Callable[[int], bool]) -> int:
    """Returns the smallest divisor of `count` that is enough, if all larger ones are; `count`: none is."""
    divisors = [size for size in range(1, count) if count % size == 0]
    at = bisect_left(divisors, True, key=is_enough)
    return [*divisors, count][at]


class _Config:
    """A config that notes which of its whole numbers are read."""

    def __init__(self, config: Any, note: Any) -> None:
        self._config, self._note = config, note

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._config, name)
        if type(value) is int:
            self._note(name, value, True)
        return value


@contextmanager
def numbers_read(block: nn.Module) -> Iterator[dict[Number, int]]:
    """Context that notes which whole numbers the forwards of the block's modules read from themselves and from their
    configs.
    """
    numbers: dict[Number, int] = {}
    classes = {module: type(module) for module in block.modules()}
    for name, module in block.named_modules():
        _watch(module, lambda key, value, of_config, path=name: numbers.setdefault((path, key, of_config), value))
    try:
        yield numbers
    finally:
        for module, original in classes.items():
            module.__class__ = original


def _watch(module: nn.Module, note: Any) -> None:
    original = type(module)

    def read(self: Any, name: str) -> Any:
        value = original.__getattribute__(self, name)
        if name == "config":
            return _Config(value, note)
        if type(value) is int and name in original.__getattribute__(self, "__dict__"):
            note(name, value, False)
        return value

    module.__class__ = type(original.__name__, (original,), {"__getattribute__": read})
