"""The interface of a source of tensors."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from labkit.models.policy import Policy
from labkit.models.shards import Cut
from labkit.system.errors import UserError

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class TensorSource(Protocol):
    """A source of tensors by their Hugging Face names: a model, a checkpoint, or a seeded generator."""

    def names(self) -> set[str]: ...

    def get(self, name: str, dtype: torch.dtype | None = None, cut: Cut | None = None) -> Tensor: ...


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
