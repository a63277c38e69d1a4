"""Strings that identify the weights of a source."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from xxhash import xxh3_128

from labkit.weights.protocol import TensorSource


def identity_of(source: TensorSource) -> str:
    """The source's own `identity` where it has one, else a digest of all its numbers."""
    weights = getattr(source, "weights", source)
    own: str | None = getattr(weights, "identity", None)
    if own is not None:
        return own
    digest = xxh3_128()
    for name in sorted(weights.names()):
        tensor = weights.get(name).detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return f"numbers {digest.hexdigest()}"


def identity_of_files(files: Iterable[Path]) -> str:
    """A string that changes with the path, the size or the modification time of any of the files."""
    described = []
    for file in sorted(files):
        status = file.stat()
        described.append(f"{file.resolve()} {status.st_size} {status.st_mtime_ns}")
    return "files " + "; ".join(described)
