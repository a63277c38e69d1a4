"""Planner of tensor parallelism: finds blocks, traces and reads them, and proves their cuts."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain

from torch import Tensor, nn

from labkit.engine.parallel.slicing.layout import (
    NoLayout,
    Site,
    TooManyRanks,
    common_module,
    expert_unit,
    read_unit,
)
from labkit.engine.parallel.slicing.linear import is_linear
from labkit.engine.parallel.slicing.plan import BlockPlan, RoleSource, SlicingPlan, Unit
from labkit.engine.parallel.slicing.proof import ProvingBlock
from labkit.engine.parallel.slicing.reading import Reading
from labkit.engine.parallel.slicing.recording import FAILURES, hidden_states, record
from labkit.engine.parallel.slicing.sliced import child
from labkit.engine.parallel.slicing.sources import (
    Blocks,
    InjectionPolicy,
    TransformersPlan,
    check_policy,
    linears_of,
    listed_blocks,
    policy_blocks,
)
from labkit.models.observed.calls import matrix
from labkit.system.errors import UserError


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
    lists, and roles come from transformers' plan of the model. Roles that it lacks, or that contradict the flow,
    come from the flow of data: a linear is row-parallel if other linears alone feed it and its output joins the
    residual stream.

    example: keyword arguments of the model's forward, for models that don't take `input_ids`.

    Heads, fused layouts, numbers to change and tables per head are read from one run of a copy of the block with random
    weights. A cut is accepted only if all ranks of the copy, run in this process, return the outputs of the whole
    block, with padding and with a KV cache. Embeddings, norms, the LM head, routers and other single modules are
    replicated. Attention, MLPs and experts whose cut can't be proved are replicated, too, and `BlockPlan.unproved` says
    why.

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
    blocks_by_name = policy_blocks(model, injection_policy) if injection_policy else listed_blocks(model)
    groups = _groups_alike(blocks_by_name)
    calls = record(model, {names[0]: blocks_by_name[names[0]][0] for names in groups}, example)
    planner = _Planner(tp_size, TransformersPlan.of(model))
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
    return SlicingPlan(type(model).__name__, tp_size, tuple(blocks))


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


class _Planner:
    """Plans blocks one by one. `too_many` collects the units that have fewer heads or features than there are ranks."""

    def __init__(self, ranks: int, transformers_plan: TransformersPlan) -> None:
        self.ranks, self.transformers_plan = ranks, transformers_plan
        self.too_many: list[TooManyRanks] = []

    def block(self, names: tuple[str, ...], proving: ProvingBlock, ends: tuple[str, ...] | None) -> BlockPlan:
        layer_class = type(proving.block).__name__
        if ends is not None:
            check_policy(layer_class, proving.trace, ends)
        unproved: list[str] = []
        units = list(self._units(names[0], proving, unproved))
        if ends is None:
            units += self._experts(proving)
        units = self._proved(names[0], proving, units, unproved)
        if ends is not None and unproved:
            raise UserError(unproved[0])
        contradictions: tuple[str, ...] = ()
        if ends is not None:
            units = [replace(unit, sources=(RoleSource.POLICY,)) for unit in units]
        else:
            units = [self.transformers_plan.with_sources(unit, names[0]) for unit in units]
            contradictions = tuple(self.transformers_plan.contradictions(names[0], proving.trace))
        cut = {linear.name for unit in units for linear in unit.linears}
        cut |= {tensor.name for unit in units for tensor in unit.tensors}
        stacks = [name for name, parameter in proving.block.named_parameters() if parameter.ndim == 3]
        whole = tuple(name for name in [*linears_of(proving.block), *stacks] if name not in cut)
        return BlockPlan(layer_class, names, tuple(units), whole, tuple(unproved), contradictions)

    def _units(self, block_name: str, proving: ProvingBlock, unproved: list[str]) -> Iterator[Unit]:
        """Yields the cut that ends at each row-parallel linear. Notes why others have none."""
        flow = proving.trace
        modules = {row: common_module((*flow.columns(row), row)) for row in flow.row_candidates}
        reading: Reading | None = None
        for row, module in modules.items():
            site = Site(proving.block, module, flow.columns(row), row, flow.attended(row), proving.numbers, self.ranks)
            try:
                reading = reading or proving.reading(tuple(modules), tuple(modules.values()))
                yield read_unit(site, reading)
            except TooManyRanks as error:
                where = _place(block_name, proving, module)
                self.too_many.append(TooManyRanks(where, error.kind, error.largest, self.ranks))
            except NoLayout as error:
                unproved.append(self._refusal(block_name, proving, module, str(error)))
            except FAILURES as error:
                reason = f"its gradients, which show what depends on what, fail ({type(error).__name__}: {error})"
                unproved.append(self._refusal(block_name, proving, module, reason.split("\n")[0]))

    def _experts(self, proving: ProvingBlock) -> Iterator[Unit]:
        hidden = next((rows.shape[-1] for rows in chain.from_iterable(map(hidden_states, proving.calls))), 0)
        for name, _ in proving.block.named_modules():
            if unit := expert_unit(proving.block, name, hidden, self.ranks):
                yield unit

    def _proved(self, block_name: str, proving: ProvingBlock, units: list[Unit], unproved: list[str]) -> list[Unit]:
        """Returns the units that are right together. Leaves out units that are wrong alone, and notes why."""
        if not units or not proving.objection(units, self.ranks):
            return units
        right = []
        for unit in units:
            if (objection := proving.objection([unit], self.ranks)) is None:
                right.append(unit)
            else:
                reason = f"its ranks do not give the outputs of the whole module ({objection}) if {unit.matrices}"
                unproved.append(self._refusal(block_name, proving, unit.module, reason))
        if right and (objection := proving.objection(right, self.ranks)):
            where = _place(block_name, proving, "")
            raise UserError(f"{where}: its cuts are right one by one but not together: {objection}")
        return right

    def _refusal(self, block_name: str, proving: ProvingBlock, module: str, reason: str) -> str:
        return f"{_place(block_name, proving, module)} can't be shared by {self.ranks} ranks: {reason}"


def _place(block_name: str, proving: ProvingBlock, module: str) -> str:
    return f"{child(block_name, module)} ({type(proving.block.get_submodule(module)).__name__})"
