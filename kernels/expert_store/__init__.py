"""The experts of all layers in a file. The most used ones stay in slots of memory."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator, Sequence
from ctypes import c_uint64
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from labkit.system.errors import RunError

from .. import build
from ..build import INT, LONG, POINTER, fields
from ..experts import ExpertMlps
from ..layer_stream import descriptor_of
from ..memory import reserved
from ..slot_stream import ALTERED, ENDS, READ_ERROR, closed, reason_of, require_opened
from ..types import Linear

__all__ = ["PARTS", "ExpertCounts", "ExpertStore", "ExpertsOfLayer", "StoredExpert"]

PARTS = 4  # tensors of an expert: two matrices, each with its scales
build.same_in_cpp({"kExpertParts": PARTS})

build.declare("labkit_expert_store_open", INT, POINTER, LONG, LONG, POINTER, POINTER, LONG, LONG, result=True)
build.declare("labkit_expert_store_close", POINTER)
build.declare("labkit_expert_slot_bytes", POINTER, result=True)
build.declare("labkit_expert_store_counts", POINTER, POINTER)
build.declare("labkit_expert_store_begin_pass", POINTER)
build.declare("labkit_expert_store_want", POINTER, LONG, POINTER, LONG)
build.declare("labkit_expert_store_next_wave", POINTER, POINTER, result=True)
build.declare("labkit_expert_store_part", POINTER, LONG, LONG, LONG, result=True)


class StoredExpert(NamedTuple):
    """The place of an expert in a file."""

    offsets: tuple[int, ...]  # of its PARTS; -1: it lacks this one
    digest: int  # XXH64 of the XXH64s of its parts, each as 8 bytes, the lowest first


@build.mirrors("StoredExpert")
class CStoredExpert(ctypes.Structure):
    _fields_ = [("offsets", LONG * PARTS), ("digest", c_uint64)]


COUNTS = "wanted hits guessed_hits reads bytes_read read_ns wasted_bytes guesses right wait_ns"


@build.mirrors("ExpertCounts")
class CExpertCounts(ctypes.Structure):
    _fields_ = fields((LONG, COUNTS), (LONG, "direct failure error_number failed_layer failed_expert"))


class ExpertCounts(NamedTuple):
    """Reads of experts. An expert counts once for each layer and step that wants it."""

    wanted: int  # experts that a layer's rows chose
    hits: int  # of these, already in memory
    guessed_hits: int  # of the hits, read because of a guess
    reads: int
    bytes_read: int
    read_ns: int  # of both readers
    wasted_bytes: int  # of the bytes read, for guesses that proved wrong
    guesses: int  # experts that were guessed at the beginning of their layer
    right: int  # guesses that rows then chose
    wait_ns: int  # in which steps waited for experts

    def since(self, before: ExpertCounts) -> ExpertCounts:
        """The counts from `before` until now."""
        return ExpertCounts(*(now - then for now, then in zip(self, before, strict=True)))

    @property
    def hit_rate(self) -> float:
        """Share of hits among the wanted experts; 0 before the first step."""
        return self.hits / self.wanted if self.wanted else 0.0


class ExpertStore:
    """Experts of a file that pass through `slots` pieces of memory. Its threads end with this object or `close`. Reads
    bypass the page cache if the file system supports that.

    path: of the file.
    slot_bytes: memory of an expert.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        path: Path,
        experts: Sequence[Sequence[StoredExpert]],
        part_bytes: Sequence[int],
        slots: int,
        numbers: Sequence[int] | None = None,
    ) -> None:
        """library: of the kernels that use the slots. experts: of each layer that has any. part_bytes: of each part of
        an expert, 0 for one that experts lack. slots: at least 1. numbers: of these layers in the model; None: they
        count from 0.

        Raises OSError if the file can't be opened, RunError without memory or threads.
        """
        self.path, self.slots, self._library = path, slots, library
        self._numbers = range(len(experts)) if numbers is None else numbers
        self.layers, self.per_layer = len(experts), len(experts[0])
        sizes = (LONG * PARTS)(*part_bytes)
        self.slot_bytes, self.part_bytes = self.slot_bytes_of(library, part_bytes), tuple(part_bytes)
        memory = reserved(slots * self.slot_bytes)
        entries = [CStoredExpert((LONG * PARTS)(*offsets), digest) for layer in experts for offsets, digest in layer]
        c_experts = (CStoredExpert * len(entries))(*entries)
        descriptor = descriptor_of(path)
        self.address: int = library.labkit_expert_store_open(
            descriptor,
            ctypes.addressof(c_experts),
            self.layers,
            self.per_layer,
            ctypes.addressof(sizes),
            memory.data_ptr(),
            self.slot_bytes,
            slots,
        )
        require_opened(self.address, descriptor)
        self.close = weakref.finalize(self, closed, library.labkit_expert_store_close, self.address, descriptor, memory)

    @staticmethod
    def slot_bytes_of(library: ctypes.CDLL, part_bytes: Sequence[int]) -> int:
        """Memory of an expert with parts of these sizes: it has room for the pages of the file that they touch."""
        sizes = (LONG * PARTS)(*part_bytes)
        slot_bytes: int = library.labkit_expert_slot_bytes(ctypes.addressof(sizes))
        return slot_bytes

    @property
    def bytes_per_expert(self) -> int:
        """Bytes of an expert in the file."""
        return sum(self.part_bytes)

    @property
    def counts(self) -> ExpertCounts:
        """Reads since the beginning."""
        c_counts = self._counts()
        return ExpertCounts(*(getattr(c_counts, name) for name in ExpertCounts._fields))

    @property
    def direct(self) -> bool:
        """Whether reads bypass the page cache."""
        return bool(self._counts().direct)

    def begin_pass(self) -> None:
        """A new step begins with the first layer."""
        self._library.labkit_expert_store_begin_pass(self.address)

    def waves(self, layer: int, wanted: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Experts of a layer that are in memory until the next ones are asked for. Together they are `wanted`, in the
        same order, which is ascending.
        """
        rest = (LONG * max(1, len(wanted)))(*wanted)
        self._library.labkit_expert_store_want(self.address, layer, ctypes.addressof(rest), len(wanted))
        done = 0
        while count := self._library.labkit_expert_store_next_wave(self.address, ctypes.addressof(rest) + 8 * done):
            yield tuple(rest[done : done + count])
            done += count

    def part(self, layer: int, expert: int, part: int) -> Tensor:
        """uint8 [part_bytes[part]]: a part of an expert of the present wave."""
        address = self._library.labkit_expert_store_part(self.address, layer, expert, part)
        memory = (ctypes.c_uint8 * self.part_bytes[part]).from_address(address)
        return torch.frombuffer(memory, dtype=torch.uint8)

    @property
    def pass_failed(self) -> bool:
        """Whether an expert of this step could not be read: its results are invalid."""
        return bool(self._counts().failure)

    def check(self) -> None:
        """Raises RunError if an expert of this step could not be read."""
        counts = self._counts()
        if not counts.failure:
            return
        where = f"expert {counts.failed_expert} of layer {self._numbers[counts.failed_layer]} in {self.path}"
        again = "copy the file again, or remove its folder so that it is made again"
        reason = reason_of(counts.error_number)
        raise RunError(
            {
                READ_ERROR: f"{where} can't be read: {reason}; see whether the disk is whole, then try again",
                ENDS: f"{where} is missing: the file was cut short; {again}",
                ALTERED: f"{where} was altered: its digest is not the digest of the save; {again}",
            }[counts.failure]
        )

    def _counts(self) -> CExpertCounts:
        counts = CExpertCounts()
        self._library.labkit_expert_store_counts(self.address, ctypes.addressof(counts))
        return counts


class ExpertsOfLayer(NamedTuple):
    """The experts of a layer in a store."""

    store: ExpertStore
    layer: int

    def waves(self, wanted: Sequence[int], experts: ExpertMlps) -> Iterator[tuple[tuple[int, ...], ExpertMlps]]:
        """Numbers of experts, and the MLPs with the matrices of these experts in memory, until the next ones are asked
        for. wanted: ascending. experts: the MLPs, whose matrices have their shapes, but not their numbers.
        """
        for wave in self.store.waves(self.layer, wanted):
            regions, outs = list(experts.regions), list(experts.outs)
            for expert in wave:
                regions[expert] = replace(regions[expert], up=self._placed(regions[expert].up, expert, 0))
                outs[expert] = self._placed(outs[expert], expert, 2)
            yield wave, ExpertMlps(tuple(regions), tuple(outs))

    def _placed(self, linear: Linear, expert: int, first_part: int) -> Linear:
        weight = self._part(linear.weight, expert, first_part)
        scales = None if linear.scales is None else self._part(linear.scales, expert, first_part + 1)
        return replace(linear, weight=weight, scales=scales)

    def _part(self, like: Tensor, expert: int, part: int) -> Tensor:
        return self.store.part(self.layer, expert, part).view(like.dtype).view(like.shape)
