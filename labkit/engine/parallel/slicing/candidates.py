"""Possible cuts of a unit, likeliest first. The proof decides which one is right."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from labkit.engine.parallel.slicing.linear import matrix
from labkit.engine.parallel.slicing.plan import ArgumentCut, AttributeCut, Kind, LinearCut, Role, TensorCut, Unit, kept
from labkit.engine.parallel.slicing.recording import Call, hidden_states, is_float
from labkit.engine.parallel.slicing.shares import Features, HeadGroups, Shares, grain
from labkit.engine.parallel.slicing.sliced import child
from labkit.system.errors import UserError

HEAD_SIZES = ("head_dim", "head_size", "dim_per_head", "key_value_proj_dim", "d_kv")
NOT_A_COUNT = ("dim", "size", "group", "idx", "index", "kv", "key_value")
CONFIG_NUMBERS = ("num_attention_heads", "num_key_value_heads", "num_kv_heads", "hidden_size")

MOST_TENSOR_CUTS = 32  # ways to cut the parameters other than the matrices: few of them have an axis that fits


class TooManyRanks(UserError):
    """More ranks than the `largest` heads or features of a unit."""

    def __init__(self, where: str, kind: str, largest: int, ranks: int) -> None:
        self.kind, self.largest = kind, largest
        super().__init__(
            f"{where} has {largest} {kind}, which can't be shared by {ranks} ranks; the largest degree that works is "
            f"{largest}"
        )


@dataclass(frozen=True)
class Site:
    """Matrices of a block that are cut together, with the data that the cut may depend on."""

    block: nn.Module
    module: str  # smallest module that contains the matrices
    columns: tuple[str, ...]
    row: str
    call: Call | None  # of `module`
    config: Any  # of the model, if it has one
    ranks: int

    @property
    def features(self) -> int:
        """Input features of the row-parallel matrix."""
        return self.shape(self.row)[1]

    def shape(self, linear: str) -> tuple[int, int]:
        out_features, in_features = matrix(self.block.get_submodule(linear)).shape
        return out_features, in_features

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        for name, module in self.block.get_submodule(self.module).named_modules():
            if child(self.module, name) not in (*self.columns, self.row):
                yield child(self.module, name), module

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, module in self.modules():
            for own, parameter in module.named_parameters(recurse=False):
                yield child(name, own), parameter


def common_module(names: tuple[str, ...]) -> str:
    """Returns the smallest module that contains all of `names`; "" for the block."""
    paths = [name.split(".")[:-1] for name in names]
    common = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return ".".join(parts[0] for parts in common)


def feature_units(site: Site) -> Iterator[Unit]:
    """Yields cuts by features that are independent of each other between the matrices: MLPs."""
    if site.features < site.ranks:
        raise TooManyRanks(site.row, "features", site.features, site.ranks)
    features = Features(site.features, site.ranks)
    choices = []
    for column in site.columns:
        parts, rest = divmod(site.shape(column)[0], site.features)
        if rest or not parts:
            return
        stacked = (f"{parts} stacked" if parts > 1 else "by feature", features.contiguous(parts))
        choices.append([stacked] if parts == 1 else [stacked, ("interleaved", features.interleaved(parts))])
    sizes = {site.features: features.contiguous()}
    for chosen in itertools.product(*choices):
        for tensors in _tensor_cuts(site, sizes):
            yield Unit(
                Kind.FEATURES,
                site.module,
                _linear_cuts(site, [shares for _, shares in chosen], features.contiguous()),
                _layout_text([label for label, _ in chosen]),
                tensors,
            )


def head_units(site: Site) -> Iterator[Unit]:
    """Yields cuts by heads, which are independent of each other: attention with q, k and v apart or fused, and with
    shared KV heads.

    Raises TooManyRanks if there are too few heads.
    """
    counts = _head_counts(site)
    if counts and max(counts) < site.ranks:
        raise TooManyRanks(site.module or site.row, "heads", max(counts), site.ranks)
    for count in counts:
        if count < site.ranks:
            continue
        for kv_count in _kv_counts(site, count):
            heads = HeadGroups(count, kv_count, site.features // count, site.ranks)
            choices = [list(_row_layouts(site, column, heads)) for column in site.columns]
            for chosen in itertools.product(*choices):
                yield from _with_surroundings(site, heads, list(chosen))


def _with_surroundings(site: Site, heads: HeadGroups, chosen: list[tuple[str, Shares]]) -> Iterator[Unit]:
    """Yields units with one layout of the matrices, and the possible cuts of other parameters, numbers and arguments.

    chosen: layout of each column-parallel matrix, with the shares.
    """
    by_feature = heads.by_query(heads.size)
    sizes = {heads.count: heads.by_query(1), heads.count * heads.size: by_feature}
    if heads.kv_count > 1:
        sizes = {heads.kv_count: heads.by_kv(1), heads.kv_count * heads.size: heads.by_kv(heads.size)} | sizes
    for tensors in _tensor_cuts(site, sizes):
        for attributes in _attribute_cuts(site, heads):
            yield Unit(
                Kind.ATTENTION,
                site.module,
                _linear_cuts(site, [shares for _, shares in chosen], by_feature),
                _layout_text([label for label, _ in chosen]),
                tensors,
                attributes,
                _argument_cuts(site, heads),
                kept(heads.by_query(1)),
                tuple(len(share.kv) for share in heads.shares),
            )


def _layout_text(labels: list[str]) -> str:
    return ", ".join(dict.fromkeys(labels))


def _linear_cuts(site: Site, columns: list[Shares], row: Shares) -> tuple[LinearCut, ...]:
    cuts = zip(site.columns, columns, strict=True)
    return (*(LinearCut(name, Role.COLUMN, shares) for name, shares in cuts), LinearCut(site.row, Role.ROW, row))


def _numbers(module: nn.Module) -> Iterator[tuple[str, int]]:
    for name, value in vars(module).items():
        if type(value) is int:
            yield name, value


def _head_counts(site: Site) -> list[int]:
    """Returns possible numbers of heads: from the number or size of heads in a module, else from the config."""
    numbers = [number for _, module in site.modules() for number in _numbers(module)]
    counts = [count for name, count in numbers if _is_head_count(name)]
    counts += [site.features // size for name, size in numbers if name.endswith(HEAD_SIZES) and size > 0]
    if not counts:
        counts = [getattr(site.config, "num_attention_heads", 0)]
    return [count for count in dict.fromkeys(counts) if count > 0 and site.features % count == 0]


def _is_head_count(name: str) -> bool:
    return "head" in name and not any(word in name for word in NOT_A_COUNT)


def _is_kv_count(name: str) -> bool:
    return "head" in name and any(word in name for word in ("kv", "key_value")) and "group" not in name


def _kv_counts(site: Site, count: int) -> list[int]:
    """Returns the numbers of KV heads that the widths of the columns allow, largest first."""
    size = site.features // count
    widths = [site.shape(column)[0] for column in site.columns]
    possible = {count}
    if len(widths) == 1:  # q, k and v fused
        groups, rest = divmod(widths[0] - site.features, 2 * size)
        possible = set() if rest else {groups}
    elif any(width < site.features for width in widths):
        possible = {width // size for width in widths if width < site.features and width % size == 0}
    elif len(widths) == 2:  # q, and k fused with v
        possible |= {width // (2 * size) for width in widths if width % (2 * size) == 0}
    return sorted((kv for kv in possible if kv > 0 and count % kv == 0), reverse=True)


def _row_layouts(site: Site, column: str, heads: HeadGroups) -> Iterator[tuple[str, Shares]]:
    """Yields possible layouts of the rows of a column-parallel matrix."""
    width = site.shape(column)[0]
    q, kv = heads.count * heads.size, heads.kv_count * heads.size
    if len(site.columns) == 1 and width == q + 2 * kv:
        yield "fused as all q, all k, all v", heads.stacked("qkv")
        yield "fused by KV head", heads.grouped()
    if width == q:
        yield "by head", heads.by_query(heads.size)
    elif width == kv:
        yield "by KV head", heads.by_kv(heads.size)
    elif width % heads.count == 0 and width > q:
        yield "fused by head", heads.by_query(width // heads.count)
    if len(site.columns) == 2 and width == 2 * kv:
        yield "k and v fused as all k, all v", heads.stacked("kv")
        yield "k and v fused by head", heads.by_kv(2 * heads.size)


def _tensor_cuts(site: Site, sizes: dict[int, Shares]) -> Iterator[tuple[TensorCut, ...]]:
    """Yields cuts of the parameters other than the matrices: along an axis of one of `sizes`, or left whole."""
    options: list[list[TensorCut | None]] = []
    for name, tensor in site.tensors():
        axes = [(axis, size) for size in sizes for axis, length in enumerate(tensor.shape) if length == size]
        if axes:
            options.append([*(TensorCut(name, axis, sizes[size]) for axis, size in axes), None])
    for chosen in itertools.islice(itertools.product(*options), MOST_TENSOR_CUTS):
        yield tuple(cut for cut in chosen if cut is not None)


def _attribute_cuts(site: Site, heads: HeadGroups) -> Iterator[tuple[AttributeCut, ...]]:
    """Yields cuts of numbers that the forward may read: numbers of heads, sizes derived from them, and the config's."""
    counts: list[AttributeCut] = []
    sizes: list[AttributeCut] = []
    of_config: list[AttributeCut] = []
    for module, owner in site.modules():
        for name, value in _numbers(owner):
            if local := _local_count(name, value, heads):
                counts.append(AttributeCut(module, name, value, local))
            elif not name.endswith(HEAD_SIZES) and (local := _local_size(value, heads)):
                sizes.append(AttributeCut(module, name, value, local))
        config = getattr(owner, "config", None)
        for name in CONFIG_NUMBERS:
            value = getattr(config, name, 0)
            if local := _local_count(name, value, heads) or _local_size(value, heads):
                of_config.append(AttributeCut(module, name, value, local, of_config=True))
    tried = [counts, counts + sizes, counts + of_config, counts + sizes + of_config, []]
    yield from dict.fromkeys(tuple(cuts) for cuts in tried)


def _local_count(name: str, value: Any, heads: HeadGroups) -> tuple[int, ...]:
    if type(value) is not int:
        return ()
    if _is_kv_count(name) and value == heads.kv_count:
        return tuple(len(share.kv) for share in heads.shares)
    if _is_head_count(name) and value == heads.count:
        return tuple(len(share.query) for share in heads.shares)
    if "group" in name and value == heads.group:
        return tuple(share.group for share in heads.shares)
    return ()


def _local_size(value: Any, heads: HeadGroups) -> tuple[int, ...]:
    if value == heads.count * heads.size:
        return tuple(len(share.query) * heads.size for share in heads.shares)
    if heads.kv_count < heads.count and value == heads.kv_count * heads.size:
        return tuple(len(share.kv) * heads.size for share in heads.shares)
    return ()


def _argument_cuts(site: Site, heads: HeadGroups) -> tuple[ArgumentCut, ...]:
    """Returns cuts of floating-point arguments with an axis of heads: ALiBi, position biases, masks with them."""
    rows = [] if site.call is None else hidden_states(site.call)
    if site.call is None or not rows or heads.count == 1:
        return ()
    batch = rows[0].shape[0]
    cuts = []
    arguments: list[tuple[int | str, Any]] = [*enumerate(site.call.args), *site.call.kwargs.items()]
    for key, value in arguments:
        if not is_float(value) or value.ndim < 3:
            continue
        at: list[int | Literal["batch"]] = [axis for axis, size in enumerate(value.shape[:-1]) if size == heads.count]
        if value.ndim == 3:
            at = ["batch"] if value.shape[0] == heads.count * batch else [axis for axis in at if axis == 0]
        if at:
            cuts.append(ArgumentCut(site.module, key, at[0], heads.count, heads.by_query(1)))
    return tuple(cuts)


def expert_units(block: nn.Module, module: str, hidden: int, ranks: int) -> Iterator[Unit]:
    """Yields cuts of experts in 3-D parameters [experts, …]: the first by output, the last by input features."""
    owner = block.get_submodule(module)
    stacks = {name: tensor.shape for name, tensor in owner.named_parameters(recurse=False) if tensor.ndim == 3}
    if len(stacks) < 2 or any(hidden not in shape[1:] for shape in stacks.values()):
        return
    *firsts, last = stacks
    for into, out, interleaved in itertools.product((1, 2), (1, 2), (False, True)):
        count = stacks[last][into]
        parts = {name: stacks[name][out] // count for name in firsts}
        fits = [stacks[name][out] == n * count > 0 and stacks[name][3 - out] == hidden for name, n in parts.items()]
        if not all(fits) or stacks[last][3 - into] != hidden or grain(count, ranks) == 1:
            continue  # grouped GEMMs want rows of 16 bytes, and so whole grains
        features = Features(count, ranks)
        cut = features.interleaved if interleaved else features.contiguous
        yield Unit(
            Kind.EXPERTS,
            module,
            (),
            "gate and up interleaved" if interleaved else "gate and up stacked",
            (
                *(TensorCut(child(module, name), out, cut(n)) for name, n in parts.items()),
                TensorCut(child(module, last), into, features.contiguous()),
            ),
        )
