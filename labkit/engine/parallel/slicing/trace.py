"""Trace of a block: which linears feed which, from following every tensor of one run.

Each storage carries the names of the linears that it was computed from, up to the last linear; the residual stream is a
source of its own. A cut can end at a linear whose input comes from other linears alone and whose output joins the
residual stream: no other module sees its input features.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from labkit.engine.parallel.slicing.linear import is_linear
from labkit.engine.parallel.slicing.recording import Call, hidden_states, tensors

RESIDUAL = "<residual>"
ATTENDED = "<attention>"  # marks values that passed through a softmax over positions
Sources = frozenset[str]
NOTHING: Sources = frozenset()


@dataclass(frozen=True)
class BlockTrace:
    """Flow of data through a block in one call."""

    inputs: dict[str, Sources]  # sources of each linear's input
    outputs: Sources  # sources of the block's output
    calls: dict[str, Call]  # of all modules

    @property
    def row_candidates(self) -> tuple[str, ...]:
        """Linears at which a cut can end, in the order of execution."""
        joining = [sources for sources in (*self.inputs.values(), self.outputs) if RESIDUAL in sources]
        joins = frozenset().union(self.outputs, *joining)
        rows: list[str] = []
        for name, sources in self.inputs.items():
            fed_by = sources - {ATTENDED}
            if name in joins and fed_by and RESIDUAL not in fed_by and not fed_by & set(rows):
                rows.append(name)
        return tuple(rows)

    def columns(self, row: str) -> tuple[str, ...]:
        """Returns the linears that feed `row` directly, in the order of execution. Linears that feed another one of
        them are left out.
        """
        feeding = [name for name in self.inputs if name in self.inputs[row]]
        return tuple(name for name in feeding if not any(name in self.inputs[later] for later in feeding))

    def attended(self, row: str) -> bool:
        """Tells whether the input of `row` comes from attention."""
        return ATTENDED in self.inputs[row]


class _Following(TorchDispatchMode):
    """Gives every operation's outputs the sources of all its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: dict[int, Sources] = {}
        self.alive: list[Any] = []  # keeps storages, since the address of a freed one could be reused

    def of(self, values: Any) -> Sources:
        return NOTHING.union(*(self.sources.get(_key(tensor), NOTHING) for tensor in _leaves(values)))

    def set(self, values: Any, sources: Sources) -> None:
        for tensor in _leaves(values):
            if not (tensor.is_floating_point() or tensor.is_complex()):
                continue  # chosen positions or experts: whole on every rank
            self.sources[_key(tensor)] = sources
            self.alive.append(tensor.untyped_storage())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        sources = self.of((args, kwargs))
        if sources and any(word in func.name() for word in ("softmax", "attention")):
            sources |= {ATTENDED}
        if sources:
            self.set(output, sources)  # an in-place operation's output is its input
        return output


def _leaves(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def trace(block: nn.Module, call: Call) -> BlockTrace:
    """Traces one call of the block."""
    following = _Following()
    inputs: dict[str, Sources] = {}
    calls: dict[str, Call] = {}

    def entering(name: str, linear: bool) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.setdefault(name, Call(args, kwargs))
            if linear:
                inputs[name] = inputs.get(name, NOTHING) | following.of((args, kwargs))

        return hook

    def leaving(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            following.set(output, frozenset({name}))

        return hook

    with ExitStack() as hooks, torch.no_grad():
        for name, module in block.named_modules():
            linear = is_linear(module)
            hooks.enter_context(module.register_forward_pre_hook(entering(name, linear), with_kwargs=True))
            if linear:
                hooks.enter_context(module.register_forward_hook(leaving(name)))
        following.set(hidden_states(call), frozenset({RESIDUAL}))
        with following:
            output = block(*call.args, **call.kwargs)
        first = next(tensors(output), None)
    return BlockTrace(inputs, following.of(first), calls)
