"""What the public ops check of their tensors, because the kernels read and write them without looking."""

import torch
from torch import Tensor

from labkit.system.errors import UserError

from .int8_cache import SCALE_DTYPE
from .types import LayerCache, Rows


def check_rows(name: str, tensor: Tensor, columns: int, rows: int | None = None) -> None:
    """Raises ValueError unless `tensor` is a contiguous float32 [rows, columns]; None: of any number of rows."""
    shape = tensor.shape
    if (
        tensor.dtype != torch.float32
        or len(shape) != 2
        or shape[1] != columns
        or rows not in (None, shape[0])
        or not tensor.is_contiguous()
    ):
        wanted = f"[{'rows' if rows is None else rows}, {columns}]"
        raise UserError(f"{name}: expected contiguous float32 {wanted}, got {tensor.dtype} {list(shape)}")


def check_slots(rows: Rows, cache: LayerCache) -> None:
    """Raises ValueError unless the cache has slots for the new tokens of `rows`, and each table a place for them, and
    where it is int8 a scale for each slot.
    """
    slots = cache.past + rows.tokens
    if slots > cache.keys.shape[2]:
        raise UserError(
            f"cache of {cache.keys.shape[2]} slots can't take {rows.tokens} tokens after {cache.past}; grow it"
        )
    for name, slots_of, scales in (("key", cache.keys, cache.key_scales), ("value", cache.values, cache.value_scales)):
        wanted = (SCALE_DTYPE, slots_of.shape[:3]) if slots_of.dtype == torch.int8 else None
        got = None if scales is None else (scales.dtype, scales.shape)
        if got != wanted:
            raise UserError(
                f"{name}_scales: expected bfloat16 {list(slots_of.shape[:3])} beside int8 and None beside other types, "
                f"got {'None' if scales is None else f'{scales.dtype} {list(scales.shape)}'} beside {slots_of.dtype}"
            )
    for name, table in (("visible", rows.visible), ("key_positions", rows.key_positions)):
        if table is not None and table.shape[1] < slots:
            raise UserError(f"{name}: expected [{rows.batch}, {slots} or more], got {list(table.shape)}")
