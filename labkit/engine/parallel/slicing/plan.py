"""Cuts of a model for tensor parallelism, as data. Nothing here touches a weight."""

from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Literal

from labkit.engine.parallel.slicing.shares import Shares


class Role(StrEnum):
    COLUMN = "column"
    ROW = "row"
    WHOLE = "replicated"


class RoleSource(StrEnum):
    """Source of the names and roles of a unit's matrices."""

    POLICY = "injection_policy"
    TRANSFORMERS = "transformers' plan"
    FLOW = "the flow of data"


class Kind(StrEnum):
    ATTENTION = "attention"
    FEATURES = "feed-forward"
    EXPERTS = "experts"


@dataclass(frozen=True)
class LinearCut:
    """Cut of the linear `name`: by output features (COLUMN) or input features (ROW)."""

    name: str
    role: Role
    shares: Shares = field(repr=False)


@dataclass(frozen=True)
class TensorCut:
    """Cut of the parameter `name`, for example a bias per head, along `axis` (negative: from the last one)."""

    name: str
    axis: int
    shares: Shares = field(repr=False)


@dataclass(frozen=True)
class AttributeCut:
    """Cut of the number `name` that the forward of `module` reads from itself, or from its own copy of the config."""

    module: str
    name: str
    whole: int
    local: tuple[int, ...]
    of_config: bool = False

    def __str__(self) -> str:
        owner = f"{self.module}.config" if self.of_config else self.module
        return f"{owner}.{self.name} {self.whole} -> {_per_rank(self.local)}"


@dataclass(frozen=True)
class ArgumentCut:
    """Cut of a table with one entry per head in the arguments of `module`. Heads are an axis of the table (negative:
    from the last one), or its axis 0 is batch × heads ("batch").
    """

    module: str
    argument: int | str
    heads_at: int | Literal["batch"]
    heads: int
    shares: Shares = field(repr=False)


@dataclass(frozen=True)
class Unit:
    """Matrices that are cut together, from replicated rows to one all-reduce.

    module: the smallest module that contains them; names are relative to the block.
    heads, kv_heads: per rank; empty: the unit has no heads.
    layout: of the rows of the column-parallel matrices.
    sources: more than one, if transformers' plan names some of the matrices only.
    """

    kind: Kind
    module: str
    linears: tuple[LinearCut, ...]
    layout: str
    tensors: tuple[TensorCut, ...] = ()
    attributes: tuple[AttributeCut, ...] = ()
    arguments: tuple[ArgumentCut, ...] = ()
    heads: tuple[int, ...] = ()
    kv_heads: tuple[int, ...] = ()
    sources: tuple[RoleSource, ...] = field(default=(RoleSource.FLOW,), compare=False)

    @property
    def rows(self) -> tuple[str, ...]:
        return tuple(cut.name for cut in self.linears if cut.role == Role.ROW)

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(cut.name for cut in self.linears if cut.role == Role.COLUMN)

    @property
    def matrices(self) -> str:
        """What is cut, in words."""
        if self.kind == Kind.EXPERTS:
            return f"{', '.join(tensor.name for tensor in self.tensors)}, summed after {self.module}"
        return f"{', '.join(self.columns)} by columns, {', '.join(self.rows)} by rows"

    def __str__(self) -> str:
        text = f"{self.kind}: {self.matrices} ({self.layout})"
        if self.heads:
            text += f"; heads {_per_rank(self.heads)}, KV heads {_per_rank(self.kv_heads)}"
        tables = [] if self.kind == Kind.EXPERTS else [cut.name for cut in self.tensors]
        tables += [f"argument {cut.argument} of {cut.module}" for cut in self.arguments]
        if tables:
            text += f"; by head: {', '.join(tables)}"
        if self.attributes:
            text += f"; {', '.join(map(str, self.attributes))}"
        return text


@dataclass(frozen=True)
class BlockPlan:
    """Cuts of the blocks `names`, which have the same structure.

    replicated: linears that stay whole.
    unproved: why some of them do.
    not_followed: roles in transformers' plan that contradict the flow of data.
    """

    layer_class: str
    names: tuple[str, ...] = field(repr=False)
    units: tuple[Unit, ...]
    replicated: tuple[str, ...]
    unproved: tuple[str, ...] = ()
    not_followed: tuple[str, ...] = ()

    @property
    def all_reduces(self) -> int:
        return len(self.units)

    @cached_property
    def roles(self) -> dict[str, Role]:
        cut = {linear.name: linear.role for unit in self.units for linear in unit.linears}
        return cut | dict.fromkeys(self.replicated, Role.WHOLE)

    def __str__(self) -> str:
        blocks = self.names[0] if len(self.names) == 1 else f"{len(self.names)} like {self.names[0]}"
        lines = [f"{self.layer_class} ({blocks}): {self.all_reduces} all-reduces per layer"]
        mixed = len({unit.sources for unit in self.units}) > 1
        lines += [f"  {unit}; from {' and '.join(unit.sources)}" if mixed else f"  {unit}" for unit in self.units]
        if self.replicated:
            lines.append(f"  replicated: {', '.join(self.replicated)}")
        lines += [f"  {reason}" for reason in (*self.unproved, *self.not_followed)]
        return "\n".join(lines)


@dataclass(frozen=True)
class SlicingPlan:
    """Cuts of a model for `tp_size` ranks. `str` of it is a summary of a few lines.

    Everything outside the blocks is replicated.
    """

    model_class: str
    tp_size: int
    blocks: tuple[BlockPlan, ...]

    @property
    def chosen_by(self) -> str:
        """Sources of the cuts. `str` of a block says which unit has which, if they differ within it."""
        return " and ".join({source: 0 for block in self.blocks for unit in block.units for source in unit.sources})

    @cached_property
    def roles(self) -> dict[str, Role]:
        """Role of every linear of every block, by its name in the model. Linears outside the blocks are replicated."""
        return {
            f"{name}.{linear}": role
            for block in self.blocks
            for name in block.names
            for linear, role in block.roles.items()
        }

    @property
    def all_reduces(self) -> int:
        """All-reduces of one pass through all blocks."""
        return sum(block.all_reduces * len(block.names) for block in self.blocks)

    def __str__(self) -> str:
        head = (
            f"{self.model_class} over {self.tp_size} ranks, {self.all_reduces} all-reduces; row-parallel linears "
            f"from {self.chosen_by}, each cut proved on a block with random weights"
        )
        return "\n".join([head, *map(str, self.blocks)])


def _per_rank(values: tuple[int, ...]) -> str:
    return str(values[0]) if len(set(values)) == 1 else "/".join(map(str, values))
