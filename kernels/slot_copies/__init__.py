"""Copies between the sequences of a KV cache, in place."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref
from typing import NamedTuple

from .. import build
from ..abi import CCache
from ..build import INT, LONG, POINTER, fields, mirrors

AT_ONCE = 1 << 20  # bytes that one thread copies before another one has woken up

build.declare("labkit_copy_slots", POINTER, LONG, LONG, LONG, POINTER, LONG, LONG, INT, allocates=True)


@mirrors("SlotCopy")
class CSlotCopy(ctypes.Structure):
    _fields_ = fields((LONG, "to from begin"))


class SlotCopy(NamedTuple):
    """From slot `begin` on, sequence `to` gets the slots of sequence `source`."""

    to: int
    source: int
    begin: int


def copy_slots(
    caches: ctypes.Array[CCache],
    copies: Sequence[SlotCopy],
    end: int,
    *,
    heads: int,
    slot_bytes: int,
    threads: int,
) -> None:
    """Makes all copies at once: each reads the slots as they were before. Slots from `end` on are not copied.

    caches: of all layers, on the CPU. heads: of keys and values. slot_bytes: of the keys of one slot and head. The
    caller makes sure that the sequences and slots of the copies exist.
    """
    needed = [copy for copy in copies if copy.begin < end and copy.to != copy.source]
    if not needed:
        return
    slots = sum(end - copy.begin for copy in needed)
    if slots * len(caches) * heads * 2 * slot_bytes < AT_ONCE:
        threads = 1
    c_copies = (CSlotCopy * len(needed))(*(CSlotCopy(*copy) for copy in needed))
    build.any_library().labkit_copy_slots(
        byref(caches), len(caches), heads, slot_bytes, byref(c_copies), len(needed), end, threads
    )
