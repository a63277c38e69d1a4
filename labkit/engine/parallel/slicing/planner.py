"""Planner of tensor parallelism: finds blocks, traces them, and tries possible cuts until one is proved right."""

import difflib
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

from torch import Tensor, nn

from labkit.engine.parallel.slicing.candidates import (
    Site,
    TooManyRanks,
    common_module,
    expert_units,
    feature_units,
    head_units,
)
from labkit.engine.parallel.slicing.linear import is_linear, matrix
from labkit.engine.parallel.slicing.plan import BlockPlan, SlicingPlan, Unit
from labkit.engine.parallel.slicing.proof import ProvingBlock
from labkit.engine.parallel.slicing.recording import hidden_states, record
from labkit.system.errors import UserError

InjectionPolicy = Mapping[Any, str | tuple[str, ...] | list[str]]
Blocks = dict[str, tuple[nn.Module, tuple[str, ...] | None]]  # block by name, with the ends of its row linears' names


def plan_slicing(
    model: nn.Module,
    tp_size: int,
    injection_policy: InjectionPolicy | None = None,
    *,
    example: Mapping[str, Tensor] | None = None,
) -> SlicingPlan:
    """Returns the plan of `model` for `tp_size` ranks. Does not change the model.

    injection_policy: DeepSpeed's, for example `{T5Block: ("SelfAttention.o", "DenseReluDense.wo")}`. In blocks of this
    class (or of a class with this name), linears whose names have these ends are row-parallel with an all-reduce, and
    the linears that feed them are column-parallel. Without a policy, the blocks are the members of the model's module
    lists, and a linear is row-parallel if other linears alone feed it and its output joins the residual stream.

    example: keyword arguments of the model's forward, for models that don't take `input_ids`. None of its sizes, such
    as the batch, may be a number of heads.

    Heads, fused layouts, adjusted numbers and tables per head are tried out. A cut is accepted only if all ranks of a
    copy of the block with random weights, run in this process, return the outputs of the whole block, with padding and
    with a KV cache. Embeddings, norms, the LM head, routers and other single modules are replicated. Attention, MLPs
    and experts whose cut can't be proved are replicated, too, and `BlockPlan.unproved` says why.

    Raises ValueError if nothing can be cut. With a policy, raises it for a module whose cut can't be proved, and for a
    policy that names no linear or leaves one out. For more ranks than heads the message has the largest degree that
    works.
    """
    if tp_size < 1:
        raise UserError(f"tp_size={tp_size}; expected at least 1")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UserError(f"{type(model).__name__} has weights on the meta device; load them before planning")
    for name, module in model.named_modules():
        if is_linear(module) and not (weight := matrix(module)).is_floating_point():
            raise UserError(f"{name} has weights of {weight.dtype}; only floating-point weights can be shared by ranks")
    blocks_by_name = _policy_blocks(model, injection_policy) if injection_policy else _listed_blocks(model)
    groups = _groups_alike(blocks_by_name)
    calls = record(model, {names[0]: blocks_by_name[names[0]][0] for names in groups}, example)
    planner = _Planner(tp_size, getattr(model, "config", None))
    blocks = []
    for names in groups:
        if names[0] in calls:
            block, ends = blocks_by_name[names[0]]
            blocks.append(planner.block(names, ProvingBlock.of(block, calls[names[0]]), ends))
    if planner.too_many:
        raise min(planner.too_many, key=lambda error: error.largest)
    if not any(plan.units for plan in blocks):
        if unproved := [reason for plan in blocks for reason in plan.unproved]:
            raise UserError(unproved[0])
        raise UserError(
            f"{type(model).__name__} has no linears that can be shared by ranks: none is fed by other linears and "
            "joins a residual stream"
        )
    chosen_by = "injection_policy" if injection_policy else "the flow of data"
    return SlicingPlan(type(model).__name__, tp_size, chosen_by, tuple(blocks))


def _listed_blocks(model: nn.Module) -> Blocks:
    """Returns the members of the outermost module lists."""
    blocks: Blocks = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{block}.") for block in blocks):
            for place, block in module.named_children():
                if any(is_linear(part) for part in block.modules()):
                    blocks[f"{name}.{place}" if name else place] = (block, None)
    if not blocks:
        raise UserError(
            f"{type(model).__name__} has no list of layers; name its layer class and row-parallel linears in "
            "injection_policy={LayerClass: ('attention.output', 'mlp.output')}"
        )
    return blocks


def _policy_blocks(model: nn.Module, policy: InjectionPolicy) -> Blocks:
    chosen: Blocks = {}
    for layer_class, row_names in policy.items():
        ends = (row_names,) if isinstance(row_names, str) else tuple(row_names)
        blocks = {name: module for name, module in model.named_modules() if _is_a(module, layer_class)}
        class_name = layer_class if isinstance(layer_class, str) else layer_class.__name__
        if not blocks:
            classes = sorted({type(module).__name__ for module in model.modules()})
            raise UserError(
                f"injection_policy names {class_name}, but {type(model).__name__} has no such block; "
                f"{_near(class_name, classes)}"
            )
        linears = sorted({name for block in blocks.values() for name in _linears(block)})
        for end in ends:
            if not any(name.endswith(end) for name in linears):
                raise UserError(
                    f"injection_policy: no linear of {class_name} has a name that ends with {end!r}; "
                    f"{_near(end, linears)}"
                )
        chosen |= {name: (block, ends) for name, block in blocks.items()}
    return chosen


def _is_a(module: nn.Module, layer_class: Any) -> bool:
    if isinstance(layer_class, str):
        return type(module).__name__ == layer_class
    return isinstance(module, layer_class)


def _near(end: str, names: list[str]) -> str:
    """Returns a hint with close matches, among ends of names with the same number of parts, and with all names."""
    tails = sorted({".".join(name.split(".")[-end.count(".") - 1 :]) for name in names})
    near = difflib.get_close_matches(end, tails, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    return f"{hint}It has {', '.join(names)}"


def _linears(block: nn.Module) -> list[str]:
    return [name for name, module in block.named_modules() if is_linear(module)]


def _groups_alike(blocks: Blocks) -> list[tuple[str, ...]]:
    """Returns groups of names of blocks with the same structure, which get the same plan."""
    groups: dict[object, list[str]] = {}
    for name, (block, ends) in blocks.items():
        groups.setdefault((_structure(block), ends), []).append(name)
    return [tuple(names) for names in groups.values()]


def _structure(block: nn.Module) -> tuple[object, ...]:
    parts: list[object] = []
    for name, module in block.named_modules():
        numbers = tuple(item for item in vars(module).items() if _is_structural(*item))
        shapes = tuple((key, tuple(tensor.shape)) for key, tensor in module.named_parameters(recurse=False))
        parts.append((name, type(module), numbers, shapes))
    return tuple(parts)


def _is_structural(name: str, value: object) -> bool:
    """Tells whether an attribute may change how a block is cut. A layer's number does not."""
    return (isinstance(value, bool | str) and name != "training") or (type(value) is int and "head" in name)


def _module_of(proving: ProvingBlock, row: str) -> str:
    return common_module((*proving.trace.columns(row), row))


class UnprovedCut(UserError):
    """No cut of a module gives its outputs."""


class _Planner:
    """Plans blocks one by one. `too_many` collects the units that have fewer heads or features than there are ranks."""

    def __init__(self, ranks: int, config: Any) -> None:
        self.ranks, self.config = ranks, config
        self.too_many: list[TooManyRanks] = []

    def block(self, names: tuple[str, ...], proving: ProvingBlock, ends: tuple[str, ...] | None) -> BlockPlan:
        layer_class = type(proving.block).__name__
        if ends is not None:
            self._check_policy(layer_class, proving, ends)
        units: list[Unit] = []
        unproved: list[str] = []
        for row in proving.trace.row_candidates:
            try:
                if unit := self._unit(names[0], proving, row):
                    units.append(unit)
            except UnprovedCut as error:
                if ends is not None:
                    raise
                unproved.append(str(error))
        if ends is None:
            units += self._experts(proving)
        if len(units) > 1 and (objection := proving.objection(units, self.ranks)):
            raise UserError(f"{names[0]} ({layer_class}): its cuts are right one by one but not together: {objection}")
        cut = {linear.name for unit in units for linear in unit.linears}
        cut |= {tensor.name for unit in units for tensor in unit.tensors}
        stacks = [name for name, parameter in proving.block.named_parameters() if parameter.ndim == 3]
        whole = tuple(name for name in [*_linears(proving.block), *stacks] if name not in cut)
        return BlockPlan(layer_class, names, tuple(units), whole, tuple(unproved))

    def _check_policy(self, layer_class: str, proving: ProvingBlock, ends: tuple[str, ...]) -> None:
        rows = proving.trace.row_candidates
        for name, sources in proving.trace.inputs.items():
            named = name.endswith(ends)
            if named and name not in rows:
                raise UserError(
                    f"injection_policy makes {name} of {layer_class} row-parallel, but its input does not come from "
                    f"other linears of the layer alone; linears that fit: {', '.join(rows) or 'none'}"
                )
            if not named and name in rows:
                fed_by = ", ".join(proving.trace.columns(name)) or ", ".join(sorted(sources))
                raise UserError(
                    f"injection_policy leaves out {name} of {layer_class}: {fed_by} would be column-parallel and feed "
                    f"it only a share of its input; add {name!r}"
                )

    def _unit(self, block_name: str, proving: ProvingBlock, row: str) -> Unit | None:
        """Returns the first proved cut that ends at `row`. Returns None, and notes an error, if there are too many
        ranks.
        """
        columns = proving.trace.columns(row)
        module = _module_of(proving, row)
        call = proving.trace.calls.get(module)
        site = Site(proving.block, module, columns, row, call, self.config, self.ranks)
        attended = proving.trace.attended(row)
        path = f"{block_name}.{module}" if module else block_name
        owner = type(proving.block.get_submodule(module)).__name__
        cuts: Callable[[Site], Iterator[Unit]] = head_units if attended else feature_units
        objections: list[str] = []
        try:
            for unit in cuts(site):
                if (objection := proving.objection([unit], self.ranks)) is None:
                    return unit
                objections.append(objection)
        except TooManyRanks as error:
            self.too_many.append(TooManyRanks(f"{path} ({owner})", error.kind, error.largest, self.ranks))
            return None
        tried = f"{len(objections)} were tried, the first: {objections[0]}" if objections else "none fits its shapes"
        raise UnprovedCut(
            f"{path} ({owner}) can't be shared by {self.ranks} ranks: no cut of {', '.join(columns)} and {row} by "
            f"{'heads' if attended else 'features'} gives the outputs of the whole module ({tried}). Some operation in "
            "it mixes the shares of different ranks"
        )

    def _experts(self, proving: ProvingBlock) -> Iterator[Unit]:
        """Yields proved cuts of experts. Other experts stay whole, which is also right."""
        hidden = next((rows.shape[-1] for rows in chain.from_iterable(map(hidden_states, proving.calls))), 0)
        for name, _ in proving.block.named_modules():
            for unit in expert_units(proving.block, name, hidden, self.ranks):
                if proving.objection([unit], self.ranks) is None:
                    yield unit
                    break
