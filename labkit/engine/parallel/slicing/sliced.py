"""One rank's copy of a module: its share of the cut weights. Everything else is shared with the original."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from labkit.engine.parallel.slicing.linear import Reduce, RowParallelLinear, column_parallel, emptied
from labkit.engine.parallel.slicing.plan import ArgumentCut, Kind, Role, Unit
from labkit.engine.parallel.slicing.shares import Share, take


class LocalHeads:
    """Forward pre-hook that reduces a table with one entry per head to the rank's heads.

    A model that makes such tables (ALiBi slopes, position biases) knows nothing of ranks. But T5's first layer makes a
    table of the rank's heads and passes it to the other layers, so a table that is already cut stays as it is.
    """

    def __init__(self, cut: ArgumentCut, rank: int) -> None:
        self.cut, self.share = cut, cut.shares[rank]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key = self.cut.argument
        if isinstance(key, str):
            return args, kwargs | ({key: self._local(kwargs[key])} if key in kwargs else {})
        return tuple(self._local(value) if place == key else value for place, value in enumerate(args)), kwargs

    def _local(self, table: Any) -> Any:
        if not isinstance(table, Tensor):
            return table
        if self.cut.heads_at != "batch":
            whole = table.shape[self.cut.heads_at] == self.cut.heads
            return take(table, self.cut.heads_at, self.share) if whole else table
        by_head = table.unflatten(0, (-1, self.cut.heads))
        return take(by_head, 1, self.share).flatten(0, 1)


class SummedOutput:
    """Forward hook that sums a module's output over the ranks."""

    def __init__(self, reduce: Reduce) -> None:
        self.reduce = reduce

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return self.reduce(output)


def child(prefix: str, name: str) -> str:
    return ".".join(part for part in (prefix, name) if part)


def sliced_copy(
    module: nn.Module, units: Mapping[str, Sequence[Unit]], rank: int, reduce: Reduce, *, consume: bool = False
) -> Any:
    """Returns a copy of `module` for `rank`.

    units: the cuts of each block, by the block's prefix.
    consume: frees each cut weight of the module once its share is taken.

    Cut weights are copies of the rank's share. The other weights share their memory with the module's but are separate
    parameters, so that moving the copy to a device leaves the module where it is. Tied weights stay tied.
    """
    memo: dict[int, Any] = {id(tensor): _own(tensor) for tensor in module.parameters()}
    for prefix, cuts in units.items():
        for unit in cuts:
            for cut in unit.linears:
                linear = module.get_submodule(child(prefix, cut.name))
                memo[id(linear)] = _linear(linear, cut.role, cut.shares[rank], reduce)
                if consume:
                    emptied(linear)
            for tensor in unit.tensors:
                whole = module.get_parameter(child(prefix, tensor.name))
                memo[id(whole)] = _own(take(whole.detach(), tensor.axis, tensor.shares[rank]))
                if consume:
                    whole.data = torch.empty(0, dtype=whole.dtype)
    sliced = copy.deepcopy(module, memo)
    for prefix, cuts in units.items():
        for unit in cuts:
            _adjust(sliced, prefix, unit, rank, reduce)
    return sliced


def _own(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach(), requires_grad=False)


def _linear(linear: nn.Module, role: Role, share: Share, reduce: Reduce) -> nn.Module:
    if role == Role.COLUMN:
        return column_parallel(linear, share)
    return RowParallelLinear.of(linear, share, reduce)


def _adjust(made: nn.Module, prefix: str, unit: Unit, rank: int, reduce: Reduce) -> None:
    for module in {cut.module for cut in unit.attributes if cut.of_config}:  # other modules keep the whole config
        reader: Any = made.get_submodule(child(prefix, module))
        reader.config = copy.copy(reader.config)
    for cut in unit.attributes:
        owner: Any = made.get_submodule(child(prefix, cut.module))
        setattr(owner.config if cut.of_config else owner, cut.name, cut.local[rank])
    for argument in unit.arguments:
        caller = made.get_submodule(child(prefix, argument.module))
        caller.register_forward_pre_hook(LocalHeads(argument, rank), with_kwargs=True)
    if unit.kind == Kind.EXPERTS:
        made.get_submodule(child(prefix, unit.module)).register_forward_hook(SummedOutput(reduce))
