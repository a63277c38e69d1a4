"""The places of experts in a checkpoint, so that each can be read without the others.

A checkpoint has the matrices of all experts of a layer as one tensor, and their scales as another. An expert has a part
of each, and a digest of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from xxhash import xxh64

from labkit.kernels.expert_store import StoredExpert
from labkit.kernels.types import Linear
from labkit.models.shards import Shard
from labkit.weights.canonical import Canonical
from labkit.weights.checkpoint.saved import SavedWeights
from labkit.weights.checkpoint.shard_file import ShardFile, key_of, scales_of
from labkit.weights.checkpoint.tensor_writer import bytes_of

IN_ORDER = ("ff1.weight", "ff2.weight")  # the matrices of an expert, each before its scales


class StoredExperts(NamedTuple):
    """The experts in a rank's file, of the layers with these numbers."""

    numbers: tuple[int, ...]
    layers: tuple[tuple[StoredExpert, ...], ...]
    part_bytes: tuple[int, ...]  # of each of the PARTS; 0: experts lack it

    @property
    def number(self) -> int:
        return sum(map(len, self.layers))

    @property
    def bytes(self) -> int:
        """Bytes of all of them."""
        return self.number * sum(self.part_bytes)


def expert_digests(weights: Canonical, experts: int) -> list[str]:
    """For each expert XXH64 of the XXH64s of its parts, each as 8 bytes, the lowest first; in hexadecimal."""
    stacks = [
        tensor
        for name in IN_ORDER
        if isinstance(matrix := weights[name], Linear)
        for tensor in (matrix.weight, matrix.scales)
        if tensor is not None
    ]
    digests = []
    for parts in zip(*(stack.chunk(experts) for stack in stacks), strict=True):
        of_parts = b"".join(xxh64(bytes_of(part)).intdigest().to_bytes(8, "little") for part in parts)
        digests.append(xxh64(of_parts).hexdigest())
    return digests


def stored_experts(saved: SavedWeights, part: Shard) -> StoredExperts | None:
    """The experts of a rank's layers in its file. None: the layers have none, or experts that differ in size, or the
    checkpoint has no digests of them.
    """
    file, experts = saved.file(part.rank), len(part.experts)
    records = {layer.layer: layer for layer in saved.manifest.files[part.rank].layers}
    numbers = tuple(filter(part.config.has_experts, part.layers))
    found, sizes = [], set()
    for layer in numbers:
        if layer not in records or len(records[layer].experts) != experts:
            return None
        parts = list(_parts(file, layer, experts))
        sizes.add(tuple(size for _, size in parts))
        found.append(
            tuple(
                StoredExpert(tuple(-1 if at is None else at + number * size for at, size in parts), int(digest, 16))
                for number, digest in enumerate(records[layer].experts)
            )
        )
    return StoredExperts(numbers, tuple(found), sizes.pop()) if len(sizes) == 1 else None


def _parts(file: ShardFile, layer: int, experts: int) -> Iterator[tuple[int | None, int]]:
    """For each part, its offset in the file for the first expert, and its bytes. None: experts lack this part."""
    for name in IN_ORDER:
        key = key_of(name, layer)
        for tensor in (key, scales_of(key)):
            place = file.place(tensor)
            yield (None, 0) if place is None else (place[0], place[1] // experts)
