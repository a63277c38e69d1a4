"""Each rank's part of a model under tensor parallelism: its heads, rows of the MLP and rows of the vocabulary.

A rank computes its own query heads and its own part of the MLP completely. So it has a part of each sum over all heads
and of each sum over the MLP's width. Adding up these sums is the only exchange between ranks within a layer. Norms,
position tables and the biases added after these sums are on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import gcd
from typing import TYPE_CHECKING

from labkit.models.config import ExpertsSpec, ModelConfig, Shapes, alibi_slopes
from labkit.system.errors import UnsupportedError, UserError
from labkit.system.rounding import BLOCK, ceil_div

if TYPE_CHECKING:
    from torch import Tensor

# Cut along their inputs, so that each rank has a part of every output.
SUMMED = ("attn_out.weight", "ff2.weight", "shared_ff2.weight", "dense_ff2.weight")


@dataclass(frozen=True)
class Cut:
    """A part of a tensor: the ranges [begin, end) of dimension `dim`, in this order. `whole`: size of the dimension."""

    dim: int
    ranges: tuple[tuple[int, int], ...]
    whole: int

    def __call__(self, tensor: Tensor) -> Tensor:
        """The part: a view if the cut is one range, else a copy. Raises UserError for a tensor of another size."""
        if tensor.ndim <= self.dim or tensor.shape[self.dim] != self.whole:
            raise UserError(f"has shape {list(tensor.shape)}, expected {self.whole} in dimension {self.dim}")
        import torch  # late, because figures draw cuts without torch

        pieces = [tensor.narrow(self.dim, begin, end - begin) for begin, end in self.ranges]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)


def cut_of(name: str, tensor: Tensor, cut: Cut | None) -> Tensor:
    """The part of the tensor that the cut takes, or all of it without a cut. A UserError names the tensor."""
    if cut is None:
        return tensor
    try:
        return cut(tensor)
    except ValueError as error:
        raise UserError(f"{name} {error}; check that the weights and the config belong together") from None


@dataclass(frozen=True)
class Shard:
    """The part of a model that rank `rank` of `size` holds.

    query: its query heads.
    kv: its KV heads, by their numbers in the model. A KV head is listed more than once where that keeps the query
        heads in groups of equal size.
    inner: its rows of the MLP, or of each expert.
    experts: its experts; of a model without experts 0 to 1.
    shared: its rows of the shared expert.
    dense: its rows of the MLP that layers without experts have in a model with experts.
    vocab: its rows of embedding and LM head.
    layers: its layers, by their numbers in the model.
    embedding: whether it holds the embedding.
    head: whether it holds the LM head.
    ep_size: number of parts into which the ranks divide the experts.
    sums_whole: the matrices in SUMMED are not cut yet, because int8 takes its scales from whole rows.
    """

    config: ModelConfig
    rank: int
    size: int
    query: range
    kv: tuple[int, ...]
    inner: range
    experts: range
    shared: range
    dense: range
    vocab: range
    layers: range
    embedding: bool = True
    head: bool = True
    ep_size: int = 1
    sums_whole: bool = False

    @cached_property
    def local(self) -> ModelConfig:
        """This rank's part as a model of its own, with fewer layers and heads and a narrower MLP. The vocabulary stays
        whole.
        """
        experts = self.config.experts
        return replace(
            self.config.with_layers(self.layers),
            experts=None if experts is None else self._local(experts),
            num_heads=len(self.query),
            num_kv_heads=len(self.kv),
            intermediate_size=len(self.inner),
            dense_size=len(self.dense),
        )

    def _local(self, experts: ExpertsSpec) -> ExpertsSpec:
        held = None if len(self.experts) == experts.count else (self.experts.start, self.experts.stop)
        return replace(experts, shared=len(self.shared), held=held)

    @cached_property
    def layer_shapes(self) -> Shapes:
        """As `ModelConfig.layer_shapes` of any layer, for the weights that this rank reads."""
        shapes = self.local.layer_shapes()
        if not self.sums_whole:
            return shapes
        whole, own = self.config, self.local.experts
        if whole.experts and own:
            whole = replace(whole, experts=replace(whole.experts, held=own.held))
        uncut = whole.layer_shapes()
        return shapes | {name: uncut[name] for name in SUMMED if name in uncut}

    def shapes_of(self, layer: int) -> Shapes:
        """As `layer_shapes`, of a layer by its number in the model."""
        names = self.config.layer_shapes(layer)
        return {name: shape for name, shape in self.layer_shapes.items() if name in names}

    @cached_property
    def top_shapes(self) -> Shapes:
        """As `ModelConfig.top_shapes`, for the weights that this rank reads."""
        shapes = replace(self.local, vocab_size=len(self.vocab)).top_shapes()
        return {name: shape for name, shape in shapes.items() if self._needs(name.split(".")[0])}

    def _needs(self, role: str) -> bool:
        """Whether this rank holds a weight outside the layers. Embedding and head of a tied model are one matrix: a
        rank with either of them needs it.
        """
        if role == "final_norm":
            return self.layers.stop == self.config.num_layers
        if role in ("head", "project_out"):
            return self.head
        return self.embedding or (role == "embed" and self.head and self.config.tied_head)

    def vocab_of(self, rank: int) -> range:
        """The rows of embedding and LM head that another rank holds."""
        return share(self.config.vocab_size, self.size, rank, BLOCK)

    @cached_property
    def alibi_slopes(self) -> tuple[float, ...]:
        """The ALiBi slopes of this rank's query heads."""
        return alibi_slopes(self.config.num_heads)[self.query.start : self.query.stop]

    def cut(self, name: str) -> Cut | None:
        """This rank's part of the canonical weight `name`; None where it holds all of it."""
        if self.size == 1 or (self.sums_whole and name in SUMMED):
            return None
        config, role = self.config, name.split(".")[0]
        if role == "qkv":
            keys, values = config.num_heads, config.num_heads + config.num_kv_heads
            heads = (*self.query, *(keys + head for head in self.kv), *(values + head for head in self.kv))
            return self.of_heads(heads, values + config.num_kv_heads)
        if role == "sinks":
            return Cut(0, ((self.query.start, self.query.stop),), config.num_heads)
        experts = config.experts
        if role in ("ff1", "ff2") and len(self.inner) == config.intermediate_size:
            return None  # whole matrices, of this rank's experts
        if role == "ff1":
            return self._of_parts(self.inner, config.intermediate_size, len(self.experts))
        if role == "shared_ff1":
            assert experts is not None
            return self._of_parts(self.shared, experts.shared, 1)
        if role == "dense_ff1":
            return self._of_parts(self.dense, config.dense_size, 1)
        if role in ("embed", "head"):
            return Cut(0, ((self.vocab.start, self.vocab.stop),), config.vocab_size)
        if name == "attn_out.weight":
            return replace(self.of_heads(self.query, config.num_heads), dim=1)
        if name == "ff2.weight":
            return replace(self.of_inner(), dim=1)
        if name == "shared_ff2.weight":
            return replace(self.of_shared(), dim=1)
        if name == "dense_ff2.weight":
            return replace(self.of_dense(), dim=1)
        return None

    def _of_parts(self, inner: range, width: int, experts: int) -> Cut:
        """The rows `inner` of each part of a first matrix: gate and up rows, of each expert."""
        parts = experts * (2 if self.config.gated else 1)
        starts = [part * width + inner.start for part in range(parts)]
        return Cut(0, tuple((start, start + len(inner)) for start in starts), parts * width)

    def of_heads(self, heads: Iterable[int], count: int) -> Cut:
        """The rows of these heads in a matrix of `count` heads."""
        width = self.config.head_dim
        rows = joined(range(head * width, (head + 1) * width) for head in heads)
        return Cut(0, tuple((piece.start, piece.stop) for piece in rows), count * width)

    def of_inner(self) -> Cut:
        """This rank's rows of a matrix that is as wide as the MLP."""
        return Cut(0, ((self.inner.start, self.inner.stop),), self.config.intermediate_size)

    def of_shared(self) -> Cut:
        """This rank's rows of a matrix that is as wide as the shared expert."""
        assert self.config.experts is not None
        return Cut(0, ((self.shared.start, self.shared.stop),), self.config.experts.shared)

    def of_dense(self) -> Cut:
        """This rank's rows of a matrix that is as wide as the MLP of layers without experts."""
        return Cut(0, ((self.dense.start, self.dense.stop),), self.config.dense_size)


def shard(
    config: ModelConfig,
    size: int = 1,
    rank: int = 0,
    ep_size: int = 1,
    *,
    layers: range | None = None,
    embedding: bool | None = None,
    head: bool | None = None,
) -> Shard:
    """The part of rank `rank` of `size`. If heads do not divide evenly, the first ranks take one more.

    layers: consecutive layers; None: all. embedding, head: whether the rank holds them; None: it holds the embedding
    with the first layer, the head with the last. An encoder has neither.
    ep_size: number of parts into which the experts are divided. size / ep_size ranks have the same experts, each a
    part of all of their matrices.

    Raises UserError for more ranks than the model has query heads, for layers that it does not have, and for an
    `ep_size` that does not divide the ranks or is more than the number of experts.
    """
    layers = range(config.num_layers) if layers is None else layers
    if layers.step != 1 or not 0 <= layers.start < layers.stop <= config.num_layers:
        raise UserError(f"got layers {layers} of {config.num_layers}; expected consecutive layers of the model")
    embedding = layers.start == 0 if embedding is None else embedding
    head = layers.stop == config.num_layers if head is None else head
    if not 0 <= rank < size:
        raise UserError(f"rank {rank} of {size}: expected 0 to {size - 1}")
    if size > config.num_heads:
        raise UserError(
            f"{config.num_heads} query heads cannot be split over {size} ranks; use tp_size <= {config.num_heads}"
        )
    if size > 1 and config.qk_norm_whole:
        raise UnsupportedError("norms over all heads together cannot be cut among ranks yet; use tp_size=1")
    heads = head_shares(config.num_heads, config.num_kv_heads, size)[rank]
    per_part, experts = expert_ranks(config, size, ep_size), range(1)
    if config.experts:
        experts = evenly(config.experts.count, ep_size)[rank // per_part]
    inner = share(config.intermediate_size, per_part, rank % per_part, BLOCK)
    shared = share(config.experts.shared if config.experts else 0, size, rank, BLOCK)
    dense, vocab = (share(count, size, rank, BLOCK) for count in (config.dense_size, config.vocab_size))
    embedding, head = embedding and config.causal, head and config.causal
    return Shard(
        config,
        rank,
        size,
        heads.query,
        heads.kv,
        inner,
        experts,
        shared,
        dense,
        vocab,
        layers,
        embedding,
        head,
        ep_size,
    )


def expert_ranks(config: ModelConfig, size: int, ep_size: int) -> int:
    """Number of ranks that have the same experts. Raises UserError for an `ep_size` that does not fit."""
    if ep_size == 1:
        return size
    if config.experts is None:
        raise UserError(f"got ep_size={ep_size} for {config.architecture}, which has no experts; leave it out")
    if size % ep_size:
        raise UserError(
            f"got ep_size={ep_size} for {size} rank{'s' if size > 1 else ''}; expected a number that divides them: set "
            "tensor_parallel to a multiple of it"
        )
    if ep_size > config.experts.count:
        raise UserError(f"got ep_size={ep_size} for {config.experts.count} experts; expected at most as many")
    return size // ep_size


def share(count: int, size: int, rank: int, block: int = 1) -> range:
    """Rank `rank`'s share of `count` items; the first shares are the larger ones.

    Many items are shared in whole blocks. Few items are shared in fours if their number allows it, because int8 is
    stored by fours.
    """
    if count < 8 * block * size:
        block = min(block, gcd(count, 4))
    blocks = evenly(ceil_div(count, block), size)[rank]
    return range(min(blocks.start * block, count), min(blocks.stop * block, count))


def evenly(count: int, ranks: int) -> tuple[range, ...]:
    """`count` items in `ranks` consecutive ranges; the first ranks take one more where it doesn't divide."""
    per_rank, more = divmod(count, ranks)
    starts = [rank * per_rank + min(rank, more) for rank in range(ranks + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(starts))


def joined(pieces: Iterable[range]) -> tuple[range, ...]:
    """The same numbers in the same order, in as few ranges as possible."""
    merged: list[range] = []
    for piece in pieces:
        if merged and merged[-1].stop == piece.start:
            merged[-1] = range(merged[-1].start, piece.stop)
        elif len(piece):
            merged.append(piece)
    return tuple(merged)


@dataclass(frozen=True)
class HeadShare:
    """A rank's query heads and KV heads: the i-th KV head serves the i-th of equal groups of query heads."""

    query: range
    kv: tuple[int, ...]

    @property
    def group(self) -> int:
        return len(self.query) // len(self.kv)


def head_shares(query_heads: int, kv_heads: int, ranks: int) -> tuple[HeadShare, ...]:
    """The heads of each rank, for a model whose query heads share KV heads in equal groups.

    With at least as many KV heads as ranks, a rank has whole groups. With fewer, the query heads are divided, and a KV
    head is on every rank whose query heads read it. A rank may hold the same KV head more than once, so that its
    groups have one size.
    """
    per_kv = query_heads // kv_heads
    if kv_heads >= ranks:
        return tuple(HeadShare(range(kv.start * per_kv, kv.stop * per_kv), tuple(kv)) for kv in evenly(kv_heads, ranks))
    return tuple(HeadShare(query, _kv_heads(query, per_kv)) for query in evenly(query_heads, ranks))


def _kv_heads(query: range, per_kv: int) -> tuple[int, ...]:
    """The KV head of each group of query heads. All groups have one size, the largest that is possible."""
    kv_of = [head // per_kv for head in query]  # the KV head that each query head reads
    divisors = (size for size in range(len(kv_of), 0, -1) if len(kv_of) % size == 0)
    size = next(size for size in divisors if all(kv_of[at] == kv_of[at - at % size] for at in range(len(kv_of))))
    return tuple(kv_of[::size])
