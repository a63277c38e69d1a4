"""KV cache of a batch of sequences: keys and values with their length, padding and positions.

`generate`, beams and assisted decoding hold, reorder and crop it as a Hugging Face `Cache`; only the engine writes it.
"""

import copy
import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.engine.memory.beginnings import Beginnings
from labkit.engine.memory.facade import CacheFacade
from labkit.engine.memory.heads import StoredHeads, in_one
from labkit.engine.memory.slots import BLOCK, Lent, SlotPool, Slots
from labkit.engine.memory.stores import BackingStore, HeadStore
from labkit.engine.memory.tables import count_on, counted, widened
from labkit.kernels.abi import CCache
from labkit.kernels.cache_stream import CachePass, PassedCaches
from labkit.kernels.types import LayerCache, Rows
from labkit.models.config import ModelConfig
from labkit.system.errors import UserError

TABLES = ("mask", "first", "positions")  # [B, ...]


class KVCache(CacheFacade):
    """Keys and values of every layer in `capacity` slots per sequence; the first `length` slots are filled.

    Shorter sequences are padded (left, right or with holes), and `mask` says where.

    dtype: of keys and values in computation. kv_dtype: of the stored ones: int8, or None for `dtype`.
    pool: lends memory on a GPU; None: the cache has its own memory on the CPU.
    backing_store: backing store of offloaded keys and values; None: all layers are resident.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        capacity: int = 0,
        pool: SlotPool | None = None,
        kv_dtype: torch.dtype | None = None,
        backing_store: BackingStore | None = None,
    ) -> None:
        super().__init__()
        self.config, self.dtype, self.kv_dtype = config, dtype, kv_dtype or dtype
        self.pool, self.backing_store = pool, backing_store
        self.device = torch.device("cpu") if pool is None else pool.device
        self.reserved = capacity
        self.length = 0
        self.heads: HeadStore | None = None
        self.mask: Tensor | None = None  # uint8 [B, capacity], None: no padding anywhere
        self.holes = False  # whether `mask` hides more than the slots before `first`
        self.first: Tensor | None = None  # int32 [B], first visible slot
        self.positions: Tensor | None = None  # int32 [B, capacity], of each slot's token; after `length` they count on
        self.reach = 0  # 1 + the largest position so far
        self.long_text = False  # whether keys are rotated by `long_rotaries`; a step into an empty cache decides
        self._c: ctypes.Array[CCache] | None = None
        self._borrowed: Lent | None = None
        self._beginnings: Beginnings | None = None  # None: nothing is known to be common

    @property
    def slots(self) -> Slots:
        """The borrowed memory. It is borrowed anew if keys and values have moved (beams), or have too few slots."""
        if self.pool is None:
            raise RuntimeError("a cache on the CPU borrows no slots")
        self.reserve(self.batch_size, self.length + 1)
        if self._borrowed is None:
            self._borrow(self.batch_size, self.capacity)
        assert self._borrowed is not None
        return self._borrowed.slots

    @property
    def capacity(self) -> int:
        return self.heads.capacity if self.heads else 0

    @property
    def c(self) -> "ctypes.Array[CCache]":
        """The layers' C views; valid until the cache grows or is reordered."""
        if self._c is None:
            layers = range(self.config.num_layers)
            self._c = (CCache * len(layers))(*(self.layer(index).c for index in layers))
        return self._c

    @property
    def types(self) -> str:
        """The dtypes, in words for messages."""
        return f"in {self.dtype}" + ("" if self.kv_dtype == self.dtype else f" stored as {self.kv_dtype}")

    def layer(self, index: int, past: int | None = None) -> LayerCache:
        """Returns a layer's keys and values. The write position comes after `past` tokens, by default after all."""
        counter = None if self._borrowed is None else self._borrowed.slots.past
        assert self.heads is not None
        return self.heads.layer(index, self.length if past is None else past, counter)

    @property
    def stream(self) -> PassedCaches | None:
        """Stream of keys and values from the backing store to the kernels and back; None: all layers are resident."""
        return self.heads.stream if self.heads else None

    def begin_pass(self, written: range) -> CachePass | None:
        """Begins a pass over the layers that writes these tokens. Returns None if all layers are resident."""
        assert self.heads is not None
        return self.heads.begin_pass(written)

    def reserve(self, batch: int, slots: int) -> None:
        """Makes room for `slots` tokens in each of `batch` sequences, layer by layer. The first call fixes `batch`. The
        next call completes one that was interrupted.
        """
        if self.heads is not None and batch != self.batch_size:
            raise UserError(f"the cache holds {self.batch_size} sequences, got {batch}; use one cache per batch")
        if slots <= self.capacity and self._tables_fit and not self._lacks_slots:
            return
        old = capacity = self.capacity
        if slots > old:
            grown = old + max(BLOCK, old // 2) if old else 0
            capacity = max(slots, self.reserved, grown)
        if self.pool is not None:
            self._borrow(batch, capacity)
            return
        self._c = None  # before any memory that it refers to is freed
        if self.heads is None:
            self.heads = self._new_heads(batch, capacity)
        elif capacity > self.capacity:
            self.heads.grow(capacity)
        if self.mask is not None:
            self.mask = widened(self.mask, self.capacity, fill=1)
        positions = torch.zeros(batch, 0, dtype=torch.int32) if self.positions is None else self.positions
        self.positions = count_on(widened(positions, self.capacity), self.length)
        if self.first is None:
            self.first = torch.zeros(batch, dtype=torch.int32)

    @property
    def _tables_fit(self) -> bool:
        """Whether the tables on the CPU have an entry for every slot. `reserve` sets positions and `first` last."""
        return self.pool is not None or (
            self.first is not None and self.positions is not None and self.positions.shape[1] == self.capacity
        )

    @property
    def _lacks_slots(self) -> bool:
        """Whether keys and values have to pass through slots that are not borrowed yet."""
        return self.pool is not None and self.backing_store is not None and self._borrowed is None

    def _new_heads(self, batch: int, capacity: int) -> HeadStore:
        if self.backing_store is None:
            return StoredHeads.zeros(self.config, self.kv_dtype, batch, capacity, self.device)
        return self.backing_store.zeros(self.config, self.kv_dtype, batch, capacity)

    def _borrow(self, batch: int, slots: int) -> None:
        """Moves the cache and its contents to slots of the pool."""
        assert self.pool is not None
        before, old = self._borrowed, self.length
        lent = self.pool.take(self, batch, slots)
        new = lent.slots
        try:
            heads = self.pool.attach(new, self.heads, batch, slots, old)
            positions, first, visible = new.positions[:batch], new.first[:batch], new.visible[:batch]
            if self.positions is not None and self.first is not None:
                positions[:, :old] = self.positions[:, :old]
                first.copy_(self.first)
            if self.mask is not None:
                visible.fill_(1)[:, :old] = self.mask[:, :old]
        except BaseException:
            lent.give_back()
            raise
        self._borrowed = lent
        self.heads, self.positions, self.first = heads, positions, first
        self.mask = None if self.mask is None else visible
        self._count_on(old)
        if before is not None:
            before.give_back()

    def continue_in(self, batch: int, lent: Lent | None = None) -> None:
        """Continues with the first `batch` sequences of its slots, or of the filled slots `lent`."""
        before, lent = self._borrowed, lent or self._borrowed
        assert lent is not None
        slots, self._borrowed = lent.slots, lent
        assert isinstance(slots.heads, StoredHeads)
        self.heads, self.first, self.positions = slots.heads.first(batch), slots.first[:batch], slots.positions[:batch]
        self.mask = None if self.mask is None else slots.visible[:batch]
        slots.at = -1
        self._count_on(self.length)
        if before is not None and before is not lent:
            before.give_back()

    def place(
        self, batch: int, tokens: int, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Rows:
        """Makes room for `tokens` new tokens per sequence, and returns their row description. `attention_mask`
        [B, length + tokens] is for old and new tokens; None keeps the old padding and shows the new tokens.
        `position_ids` [B or 1, tokens]; None counts visible tokens, or slots, as transformers does for this
        architecture (`Policy.positions_from_mask`).
        """
        past, total = self.length, self.length + tokens
        self._make_room(batch, tokens)
        if attention_mask is not None:
            self._set_mask(attention_mask)
        positions: Tensor | None = None
        takes_them = self.config.takes_position_ids and self.config.position != "alibi"  # which is read from the mask
        if position_ids is not None and takes_them:
            positions = position_ids
        elif not self.config.positions_from_mask:
            positions = torch.arange(past, total, dtype=torch.int32, device=self.device)
        elif attention_mask is not None:
            positions = counted(attention_mask)[:, past:]
        if positions is None:
            self.reach += tokens
        else:
            assert self.positions is not None
            self.positions[:, past:total] = positions
            self._count_on(total)
        return self._rows(batch, tokens)

    def place_next(self, batch: int) -> Rows:
        """Makes room for one visible token per sequence, at the position after the last token's."""
        self._make_room(batch, 1)
        self.reach += 1
        return self._rows(batch, 1)

    def _make_room(self, batch: int, tokens: int) -> None:
        self.reserve(batch, self.length + tokens)
        if self._borrowed is not None:
            self._borrowed.slots.past.fill_(self.length)
            self._borrowed.slots.at = -1

    def _rows(self, batch: int, tokens: int) -> Rows:
        """Returns the row description of the next `tokens` tokens per sequence, which have been placed."""
        assert self.positions is not None
        assert self.first is not None
        return Rows(
            batch,
            tokens,
            self.positions.narrow(1, self.length, tokens).contiguous().view(-1),
            self.first,
            self.mask if self.holes else None,
            self.positions if self.config.position == "alibi" else None,
            *((1, 0) if self._beginnings is None else (self._beginnings.alike, self._beginnings.shared)),
        )

    def _count_on(self, length: int) -> None:
        """Sets the positions from slot `length` on."""
        assert self.positions is not None
        count_on(self.positions, length)
        self.reach = 1 + int(self.positions[:, :length].max()) if length else 0

    def _set_mask(self, attention_mask: Tensor) -> None:
        visible = attention_mask != 0
        total, self._beginnings = visible.shape[1], None
        assert self.first is not None
        if bool(visible.all()):
            self.mask, self.holes = None, False
            self.first.zero_()
            return
        if self.mask is None:
            self.mask = self.all_visible()
        self.mask[:, :total] = visible
        self.first.copy_(torch.where(visible.any(1), visible.to(torch.uint8).argmax(1), total))
        self.holes = bool((~visible).sum() != self.first.sum())

    def all_visible(self) -> Tensor:
        """Returns a mask that hides nothing. On a GPU it is the borrowed one, which decode steps read."""
        if self._borrowed is not None:
            return self._borrowed.slots.visible[: self.batch_size].fill_(1)
        return torch.ones(self.batch_size, self.capacity, dtype=torch.uint8, device=self.device)

    def commit(self, length: int, positions: Tensor | None) -> None:
        """Commits `length` tokens with written keys and values. positions: [B, length]; None: they count from 0."""
        assert self.positions is not None
        if positions is not None:
            self.positions[:, :length] = positions
        self._count_on(length)
        self.length = length

    def __deepcopy__(self, memo: dict[int, Any]) -> "KVCache":
        """Returns a copy with its own memory, to continue one prompt in several ways."""
        other = copy.copy(self)
        other._c = other._borrowed = other._beginnings = None
        if self.heads is None:
            return other
        if self.pool is None or self.backing_store is not None:
            other.heads = self.heads.copied()
        if self.pool is not None:
            other._borrow(self.batch_size, self.capacity)
        else:
            other._change_tables(torch.clone)
        return other

    def __repr__(self) -> str:
        return f"KVCache(batch={self.batch_size}, length={self.length}, capacity={self.capacity}, {self.types})"

    def reset(self) -> None:
        self.length, self.mask, self.holes, self.reach, self._beginnings = 0, None, False, 0, None
        if self.first is not None:
            self.first.zero_()
            self._count_on(0)

    def crop(self, tokens: int) -> None:
        """Drops the last -`tokens` tokens. A positive number is the length to keep (transformers' older meaning)."""
        length = self.length + tokens if tokens <= 0 else min(tokens, self.length)
        if length < 0:
            raise UserError(f"can't drop {-tokens} of {self.length} tokens")
        self.length, self._beginnings = length, None
        if self.first is not None:
            self.first.clamp_(max=length)
            self._count_on(length)
        if self.mask is not None:
            self.mask[:, length:] = 1

    def select(self, rows: Any, in_place: bool = False) -> None:
        """Replaces each tensor [B, ...] by `rows(tensor)`. in_place: the number of sequences does not grow. Offloaded
        keys and values then need little extra room, but a failure loses them.
        """
        self._c = self._beginnings = None  # before any memory that it refers to is freed
        if self.heads is not None:
            (self.heads.shrink if in_place else self.heads.change)(rows)
        self._change_tables(rows)
        if self._borrowed is not None:
            self._borrowed.give_back()
            self._borrowed = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._beginnings = self._beginnings or Beginnings(self.batch_size)
        if self._beginnings.reorder(self.heads, self.length, lambda: self.c, beam_idx.tolist()):
            self._change_tables(lambda tensor: tensor.index_select(0, beam_idx))
        else:
            super().reorder_cache(beam_idx)

    def join(self, others: Sequence["KVCache"]) -> None:
        """Appends the sequences of the others, which are empty then. All caches are of one engine on the CPU and have
        the same length and capacity. Either all of them have a mask, or none.
        """
        theirs: list[Any] = [cache.heads for cache in others]
        self._c = self._beginnings = None  # before any memory that it refers to is freed
        assert self.heads is not None
        self.heads.join(theirs)
        for name in TABLES:
            if (mine := getattr(self, name)) is not None:
                setattr(self, name, in_one([mine, *(getattr(cache, name) for cache in others)]))
        for cache in others:
            cache.heads = cache._c = cache._beginnings = None

    def _change_tables(self, rows: Any) -> None:
        for name in TABLES:
            if (tensor := getattr(self, name)) is not None:
                setattr(self, name, rows(tensor))
