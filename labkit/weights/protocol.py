"""The interface of a source of tensors, strings that identify its numbers, and checks of what it returns."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from xxhash import xxh3_128

from labkit.models.policy import Policy
from labkit.models.shards import Cut
from labkit.system.errors import UserError

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class TensorSource(Protocol):
    """A source of tensors by their Hugging Face names: a model, a checkpoint, or a seeded generator.

    A source whose `get` copies a tensor for another dtype, and for the stored one does not, says so with
    `copies_to_convert = True`.
    """

    def names(self) -> set[str]: ...

    def get(self, name: str, dtype: torch.dtype | None = None, cut: Cut | None = None) -> Tensor: ...


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


def has_own_head(policy: Policy, source: TensorSource) -> bool:
    """Whether a source has an LM head that differs from its embedding."""
    names = (f"{policy.head}.weight", f"{policy.tokens}.weight")
    if not source.names().issuperset(names):
        return False
    head, tokens = (source.get(name) for name in names)
    return head.dtype != tokens.dtype or not torch.equal(head, tokens)


def require_tied(policy: Policy, source: TensorSource) -> None:
    """Raises UserError for weights with a head of their own although the config ties it to the embedding."""
    if has_own_head(policy, source):
        raise UserError(
            f"{policy.head}.weight differs from {policy.tokens}.weight, but config.json says that they are tied; "
            "set tie_word_embeddings to false there"
        )


def require_floats(tensor: Tensor, name: str, where: str) -> Tensor:
    """Returns the tensor. Raises UserError unless it is dense and of floating-point numbers.

    where: where the tensor is stored, for the error message.
    """
    if tensor.is_meta:
        raise UserError(
            f"{name} has no numbers {where} (it is on the meta device, as layers that accelerate has offloaded are); "
            "load the model without device_map, or give init_inference its folder; offload=... keeps layers on a disk"
        )
    if tensor.layout != torch.strided:
        raise UserError(f"{name} is stored as {tensor.layout} {where}; expected a dense tensor: call to_dense() first")
    if tensor.dtype not in FLOATS:
        raise UserError(
            f"{name} is stored as {tensor.dtype} {where}; expected a floating-point checkpoint, not a quantised one"
        )
    return tensor


def finite(tensor: Tensor, name: str) -> Tensor:
    """Returns the tensor. Raises UserError if it holds a NaN or an infinity."""
    if not is_finite(tensor):
        raise UserError(f"{name} holds values that are not finite (NaN or infinity); the checkpoint is damaged")
    return tensor


def is_finite(tensor: Tensor) -> bool:
    """Whether all numbers are finite; true of an empty tensor."""
    if tensor.numel() == 0:
        return True
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) and torch.isfinite(high))
