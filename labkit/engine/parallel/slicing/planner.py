"""How a plan is made: blocks are found, traced, and cut in every way that may be right until one is proved."""

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


def plan_slicing(
    model: nn.Module,
    tp_size: int,
    injection_policy: InjectionPolicy | None = None,
    *,
    keep_whole: tuple[str, ...] = (),
    example: Mapping[str, Tensor] | None = None,
) -> SlicingPlan:
    """What each of `tp_size` ranks keeps of `model`, which is not changed.

    injection_policy: DeepSpeed's, `{T5Block: ("SelfAttention.o", "DenseReluDense.wo")}`: in blocks of that class (or of
    a class of that name) the linears whose names end so are row-parallel with an all-reduce, and the linears that feed
    them column-parallel. Without one they are found: the blocks are the members of the model's module lists, and a
    linear is row-parallel if other linears alone feed it and its output joins the residual stream.

    Heads, fused layouts, numbers to adjust and tables per head are tried out, and a cut is taken only if all ranks of
    a copy of the block with random weights, run in this process, return what the whole block does, with padding and
    with a KV cache. Embeddings, norms and the LM head are replicated, and so are routers and what else stands alone;
    experts are cut where that is proved.

    keep_whole: ends of names of modules that are to stay replicated, for what can't be proved.

    example: keyword arguments of the model's forward, for models that don't take `input_ids`; no size in it, such as
    the batch, may be a number of heads.

    Raises ValueError where a cut can't be proved, naming the module; for a policy that names no linear or leaves one
    out; and for more ranks than heads, with the largest degree that works.
    """
    if tp_size < 1:
        raise UserError(f"tp_size={tp_size}; expected at least 1")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UserError(f"{type(model).__name__} has weights on the meta device; load them before it is planned")
    for name, module in model.named_modules():
        if is_linear(module) and not (weight := matrix(module)).is_floating_point():
            raise UserError(f"{name} has weights of {weight.dtype}; only floating-point weights can be shared by ranks")
    found = _policy_blocks(model, injection_policy) if injection_policy else _listed_blocks(model)
    alike = _alike(found)
    calls = record(model, {names[0]: found[names[0]][0] for names in alike}, example)
    planner = _Planner(tp_size, getattr(model, "config", None), keep_whole)
    blocks = tuple(
        planner.block(names, ProvingBlock.of(found[names[0]][0], calls[names[0]]), found[names[0]][1])
        for names in alike
        if names[0] in calls
    )
    if planner.too_many:
        raise min(planner.too_many, key=lambda error: error.largest)
    if not any(block.units for block in blocks):
        raise UserError(
            f"{type(model).__name__} has no linears that can be shared by ranks: none is fed by other linears and "
            "joins a residual stream"
        )
    chosen_by = "injection_policy" if injection_policy else "the flow of data"
    return SlicingPlan(type(model).__name__, tp_size, chosen_by, blocks)


Found = dict[str, tuple[nn.Module, tuple[str, ...] | None]]  # block by name, and the ends of its rows' names


def _listed_blocks(model: nn.Module) -> Found:
    """The members of the outermost module lists."""
    found: Found = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{block}.") for block in found):
            for place, block in module.named_children():
                if any(is_linear(each) for each in block.modules()):
                    found[f"{name}.{place}" if name else place] = (block, None)
    if not found:
        raise UserError(
            f"{type(model).__name__} has no list of layers; name its layer class and row-parallel linears in "
            "injection_policy={LayerClass: ('attention.output', 'mlp.output')}"
        )
    return found


def _policy_blocks(model: nn.Module, policy: InjectionPolicy) -> Found:
    found: Found = {}
    for layer_class, given in policy.items():
        ends = (given,) if isinstance(given, str) else tuple(given)
        blocks = {name: module for name, module in model.named_modules() if _is_a(module, layer_class)}
        wanted = layer_class if isinstance(layer_class, str) else layer_class.__name__
        if not blocks:
            have = sorted({type(module).__name__ for module in model.modules()})
            raise UserError(
                f"injection_policy names {wanted}, of which {type(model).__name__} has none; {_near(wanted, have)}"
            )
        linears = sorted({name for block in blocks.values() for name in _linears(block)})
        for end in ends:
            if not any(_matches(name, end) for name in linears):
                raise UserError(
                    f"injection_policy: no linear of {wanted} has a name that ends with {end!r}; {_near(end, linears)}"
                )
        found |= {name: (block, ends) for name, block in blocks.items()}
    return found


def _is_a(module: nn.Module, layer_class: Any) -> bool:
    if isinstance(layer_class, str):
        return type(module).__name__ == layer_class
    return isinstance(module, layer_class)


def _matches(name: str, end: str) -> bool:
    return name.endswith(end)


def _near(wanted: str, have: list[str]) -> str:
    """What was perhaps meant, among ends of names with as many parts, and all there is."""
    tails = sorted({".".join(name.split(".")[-wanted.count(".") - 1 :]) for name in have})
    near = difflib.get_close_matches(wanted, tails, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    return f"{hint}It has {', '.join(have)}"


def _linears(block: nn.Module) -> list[str]:
    return [name for name, module in block.named_modules() if is_linear(module)]


def _alike(found: Found) -> list[tuple[str, ...]]:
    """Names of blocks that have the same structure, and so the same plan."""
    groups: dict[object, list[str]] = {}
    for name, (block, ends) in found.items():
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
    """Whether an attribute may tell blocks apart that are not cut alike; a layer's number does not."""
    return (isinstance(value, bool | str) and name != "training") or (type(value) is int and "head" in name)


def _module_of(proving: ProvingBlock, row: str) -> str:
    return common_module((*proving.trace.columns(row), row))


class _Planner:
    def __init__(self, ranks: int, config: Any, keep_whole: tuple[str, ...]) -> None:
        self.ranks, self.config, self.keep_whole = ranks, config, keep_whole
        self.too_many: list[TooManyRanks] = []

    def block(self, names: tuple[str, ...], proving: ProvingBlock, ends: tuple[str, ...] | None) -> BlockPlan:
        layer_class = type(proving.block).__name__
        if ends is not None:
            self._check_policy(layer_class, proving, ends)
        rows = [row for row in proving.trace.row_candidates if not self._whole(_module_of(proving, row))]
        units = [unit for row in rows if (unit := self._unit(names[0], proving, row))]
        if ends is None:
            units += self._experts(proving)
        if len(units) > 1 and (objection := proving.objection(units, self.ranks)):
            raise UserError(f"{names[0]} ({layer_class}): its cuts are right one by one but not together: {objection}")
        cut = {linear.name for unit in units for linear in unit.linears}
        cut |= {tensor.name for unit in units for tensor in unit.tensors}
        stacks = [name for name, parameter in proving.block.named_parameters() if parameter.ndim == 3]
        whole = tuple(name for name in [*_linears(proving.block), *stacks] if name not in cut)
        return BlockPlan(layer_class, names, tuple(units), whole)

    def _check_policy(self, layer_class: str, proving: ProvingBlock, ends: tuple[str, ...]) -> None:
        rows = proving.trace.row_candidates
        for name, sources in proving.trace.inputs.items():
            named = any(_matches(name, end) for end in ends)
            if named and name not in rows:
                raise UserError(
                    f"injection_policy makes {name} of {layer_class} row-parallel, but its input is not made by other "
                    f"linears of the layer alone; those are {', '.join(rows) or 'none'}"
                )
            if not named and name in rows:
                fed_by = ", ".join(proving.trace.columns(name)) or ", ".join(sorted(sources))
                raise UserError(
                    f"injection_policy leaves out {name} of {layer_class}: {fed_by} would be column-parallel and feed "
                    f"it only a share of its input; add {name!r}"
                )

    def _unit(self, block_name: str, proving: ProvingBlock, row: str) -> Unit | None:
        """The first way to cut what ends at `row` that is proved; None, and a note, where ranks are too many."""
        columns = proving.trace.columns(row)
        module = _module_of(proving, row)
        call = proving.trace.calls.get(module)
        site = Site(proving.block, module, columns, row, call, self.config, self.ranks)
        attended = proving.trace.attended(row)
        where = f"{block_name}.{module}" if module else block_name
        owner = type(proving.block.get_submodule(module)).__name__
        ways: Callable[[Site], Iterator[Unit]] = head_units if attended else feature_units
        objections: list[str] = []
        try:
            for unit in ways(site):
                if (objection := proving.objection([unit], self.ranks)) is None:
                    return unit
                objections.append(objection)
        except TooManyRanks as error:
            self.too_many.append(TooManyRanks(f"{where} ({owner})", error.kind, error.largest, self.ranks))
            return None
        tried = f"{len(objections)} were tried, the first: {objections[0]}" if objections else "none fits its shapes"
        raise UserError(
            f"{where} ({owner}) can't be shared by {self.ranks} ranks: {', '.join(columns)} and {row} were to be cut "
            f"by {'heads' if attended else 'features'}, but no such cut gives what the whole module does ({tried}). "
            f"Something in it mixes what the ranks would hold apart; keep_whole=({module or row!r},) leaves it "
            "replicated"
        )

    def _whole(self, name: str) -> bool:
        return any(name.endswith(end) for end in self.keep_whole)

    def _experts(self, proving: ProvingBlock) -> Iterator[Unit]:
        """Experts that can be cut; others stay whole, which is right too."""
        hidden = next((rows.shape[-1] for rows in chain.from_iterable(map(hidden_states, proving.calls))), 0)
        for name, _ in proving.block.named_modules():
            if self._whole(name):
                continue
            for unit in expert_units(proving.block, name, hidden, self.ranks):
                if proving.objection([unit], self.ranks) is None:
                    yield unit
                    break
