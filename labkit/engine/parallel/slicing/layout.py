"""Cut of a unit, as read: which rows, table entries and numbers belong to each rank's heads or features."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from labkit.engine.parallel.slicing.linear import is_linear
from labkit.engine.parallel.slicing.plan import ArgumentCut, AttributeCut, Kind, LinearCut, Role, TensorCut, Unit
from labkit.engine.parallel.slicing.reading import Axis, Number, Reading, tables
from labkit.engine.parallel.slicing.shares import HeadGroups, Owners, Shares, features, grain, lengths
from labkit.engine.parallel.slicing.sliced import child
from labkit.system.errors import UserError

HEAD_SIZES = ("head_dim", "head_size", "dim_per_head", "key_value_proj_dim", "d_kv")
NOT_A_COUNT = ("dim", "size")


class TooManyRanks(UserError):
    """More ranks than the `largest` heads or features of a unit."""

    def __init__(self, where: str, kind: str, largest: int, ranks: int) -> None:
        self.kind, self.largest = kind, largest
        super().__init__(
            f"{where} has {largest} {kind}, which can't be shared by {ranks} ranks; the largest degree that works is "
            f"{largest}"
        )


class NoLayout(UserError):
    """The heads or features of a unit depend on each other."""


@dataclass(frozen=True)
class Site:
    """Matrices of a block that are cut together.

    module: the smallest module that contains them.
    attended: they belong to attention.
    numbers: that the forward of the block reads.
    """

    block: nn.Module
    module: str
    columns: tuple[str, ...]
    row: str
    attended: bool
    numbers: Mapping[Number, int]
    ranks: int


def common_module(names: tuple[str, ...]) -> str:
    """Returns the smallest module that contains all of `names`; "" for the block."""
    paths = [name.split(".")[:-1] for name in names]
    common = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return ".".join(parts[0] for parts in common)


def read_unit(site: Site, reading: Reading) -> Unit:
    """Returns the cut of a unit. Raises NoLayout if the unit mixes heads or features, and TooManyRanks."""
    flow = reading.flow(site.row, site.columns, site.module)
    size = flow.head_size()
    count = flow.features // size
    if count == 1:
        raise NoLayout(f"all input features of {site.row} depend on the same outputs of {', '.join(site.columns)}")
    if count < site.ranks:
        raise TooManyRanks(site.row, "features" if size == 1 else "heads", count, site.ranks)
    if size == 1:  # features: one part for each rank
        rows = features(count, site.ranks)
        parts, heads = [share[0] for share in rows], HeadGroups(site.ranks, site.ranks, site.ranks)
    else:
        parts = [range(start, start + size) for start in range(0, flow.features, size)]
        heads = HeadGroups(count, count // flow.group_size(parts), site.ranks)
        rows = heads.by_query(size)
    owners = flow.owners(parts, heads.group)
    columns = {name: owners[name, -1] for name in site.columns if (name, -1) in owners}
    for name, axis in columns.items():
        if not axis.complete:
            raise NoLayout(f"some outputs of {name} belong to several heads or features of {site.row}, or to none")
    kind = Kind.ATTENTION if site.attended or size > 1 else Kind.FEATURES
    outputs = {name: axis.along(heads) for name, axis in columns.items()}
    tensors = tuple(_tensor_cuts(site, heads, owners))
    sizes = {flow.features: lengths(rows)}
    for name, shares in outputs.items():
        sizes = _sizes(columns[name], shares) | sizes
    for tensor in tensors:
        sizes = _sizes(owners[tensor.name, tensor.axis], tensor.shares) | sizes
    linears = [LinearCut(name, Role.COLUMN, shares) for name, shares in outputs.items()]
    return Unit(
        kind,
        site.module,
        (*linears, LinearCut(site.row, Role.ROW, rows)),
        ", ".join(dict.fromkeys(_layout(axis, flow.features, kind) for axis in columns.values())),
        tensors,
        tuple(_attribute_cuts(site, heads, sizes, size > 1, columns)),
        tuple(_argument_cuts(site, heads, owners)),
        tuple(len(share.query) for share in heads.shares) if kind == Kind.ATTENTION else (),
        tuple(len(share.kv) for share in heads.shares) if kind == Kind.ATTENTION else (),
    )


def _layout(owners: Owners, features: int, kind: Kind) -> str:
    """Describes the rows of a column-parallel linear."""
    sections, width, shared = len(owners.sections()), len(owners.group), owners.place < 0
    if kind == Kind.FEATURES:
        return f"{sections} stacked" if sections > 1 else "by feature" if width == features else "interleaved"
    order = "by KV head" if shared.any() else "by head"
    if sections > 1:
        return f"{sections} stacked {order}"
    return f"fused {order}" if width > features or (shared.any() and not shared.all()) else order


def _tensor_cuts(site: Site, heads: HeadGroups, owners: Mapping[Axis, Owners]) -> Iterator[TensorCut]:
    """Yields cuts of the parameters of which heads or features need their own entries."""
    for name, tensor in tables(site.block, site.module):
        for axis in range(-tensor.ndim, 0):
            owned = owners.get((name, axis))
            if owned and owned.complete and lengths(shares := owned.along(heads)) != (tensor.shape[axis],) * site.ranks:
                yield TensorCut(name, axis, shares)
                break


def _argument_cuts(site: Site, heads: HeadGroups, owners: Mapping[Axis, Owners]) -> Iterator[ArgumentCut]:
    """Yields cuts of arguments with an entry for each head: ALiBi, position biases, masks with them."""
    each = list(range(heads.count))
    for (name, axis), owned in owners.items():
        if not isinstance(name, str) and owned.complete and (owned.place >= 0).all():
            module, argument = name
            order = (owned.group * heads.group + owned.place).tolist()
            if order == each:
                yield ArgumentCut(module, argument, axis, heads.count, heads.by_query())
            elif (name, axis - 1) not in owners and order == each * (len(order) // len(each)):
                yield ArgumentCut(module, argument, "batch", heads.count, heads.by_query())


Sizes = dict[int, tuple[int, ...]]  # length of an axis, or of its section, before the cut -> on each rank


def _sizes(owners: Owners, shares: Shares) -> Sizes:
    sizes = {len(owners.group): lengths(shares)}
    for section in owners.sections():
        local = [sum(len(set(section).intersection(piece)) for piece in share) for share in shares]
        sizes.setdefault(len(section), tuple(local))
    return sizes


def _attribute_cuts(
    site: Site, heads: HeadGroups, sizes: Sizes, has_heads: bool, columns: Iterable[str]
) -> Iterator[AttributeCut]:
    """Yields cuts of numbers that the forward reads: counts of heads and sizes."""
    owners = {name.rpartition(".")[0] for name in (*columns, site.row)}
    others = {name.rpartition(".")[0] for name, module in site.block.named_modules() if is_linear(module)} - owners
    for (module, name, of_config), value in site.numbers.items():
        inside = not site.module or f"{module}.".startswith(f"{site.module}.")
        if not inside or module in others or is_linear(site.block.get_submodule(module)):
            continue
        local = (_local_count(name, value, heads) if has_heads else ()) or _local_size(name, value, heads, sizes)
        if local and set(local) != {value}:
            yield AttributeCut(module, name, value, local, of_config)


def _local_count(name: str, value: int, heads: HeadGroups) -> tuple[int, ...]:
    """Returns the ranks' numbers of heads, KV heads or heads in a group; (): it counts something else."""
    of_kv = "kv" in name or "key_value" in name
    query = (heads.count, tuple(len(share.query) for share in heads.shares))
    kv = (heads.kv_count, tuple(len(share.kv) for share in heads.shares))
    if "group" in name:  # key_value_groups is the number of heads in a group
        possible = [(heads.group, tuple(share.group for share in heads.shares))] if of_kv else [kv]
    elif "head" in name and not any(word in name for word in NOT_A_COUNT):
        possible = [kv, query] if of_kv else [query, kv]
    else:
        return ()
    return next((local for whole, local in possible if whole == value), ())


def _local_size(name: str, value: int, heads: HeadGroups, sizes: Sizes) -> tuple[int, ...]:
    """Returns the ranks' parts of a size; (): it isn't cut, or is too small to tell it from other numbers."""
    of_one_head = name.endswith(HEAD_SIZES) and not name.startswith("all")
    return () if of_one_head or value <= heads.count else sizes.get(value, ())


def expert_unit(block: nn.Module, module: str, hidden: int, ranks: int) -> Unit | None:
    """Returns the cut of experts in 3-D parameters [experts, …]: the first by output, the last by input features. None:
    the module has no such experts, or their width isn't a multiple of what grouped GEMMs want.

    transformers' experts say whether their matrices are transposed, and whether gate and up are interleaved.
    """
    owner: Any = block.get_submodule(module)
    stacks = {name: tensor.shape for name, tensor in owner.named_parameters(recurse=False) if tensor.ndim == 3}
    if len(stacks) < 2:
        return None
    *firsts, last = stacks
    into = 1 if getattr(owner, "is_transposed", stacks[last][1] != hidden) else 2
    count = stacks[last][into]
    parts = {name: stacks[name][3 - into] // max(count, 1) for name in firsts}
    fits = [stacks[name][3 - into] == n * count > 0 and stacks[name][into] == hidden for name, n in parts.items()]
    if not all(fits) or stacks[last][3 - into] != hidden or grain(count, ranks) == 1:
        return None
    interleaved = not getattr(owner, "is_concatenated", True)
    cuts = [
        TensorCut(child(module, name), 3 - into, features(count, ranks, n, interleaved=interleaved))
        for name, n in parts.items()
    ]
    layout = "gate and up interleaved" if interleaved else "gate and up stacked"
    return Unit(Kind.EXPERTS, module, (), layout, (*cuts, TensorCut(child(module, last), into, features(count, ranks))))
