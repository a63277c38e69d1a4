"""Refusals of modules whose weights are packed for the kernels, for operations that would otherwise fail silently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Self

import torch
from torch import Tensor

from labkit.system.errors import UnsupportedError


class PackedModule:
    """Base of an nn.Module whose weights are packed records for the kernels, and not parameters.

    dtype, device: of the packed weights.
    """

    dtype: Any
    device: Any

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Implements `to`, `half`, `cuda` and similar calls. Raises ValueError if the call would change anything."""
        probe = torch.empty(0, dtype=self.dtype, device=self.device)
        target = fn(probe)
        if (target.dtype, target.device.type) != (probe.dtype, probe.device.type):
            raise UnsupportedError(
                f"the weights are packed in {probe.dtype} on {probe.device}, got a request for {target.dtype} on "
                f"{target.device}; call init_inference again with the dtype, on the device"
            )
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(
            "the weights are packed for the kernels, and a state_dict would be empty; use the original model's, or "
            "save the engine with init_inference(..., save_mp_checkpoint_path=FOLDER)"
        )

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuses. `load_state_dict` of this module, and of a module that contains it, calls this."""
        raise UnsupportedError(
            "the weights are packed for the kernels, and load_state_dict would change none, strict or not; load "
            "into the original model, and call init_inference again"
        )

    def save_pretrained(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(
            "the weights are packed for the kernels, and a saved model would have none; save the original model, or "
            "the engine with init_inference(..., save_mp_checkpoint_path=FOLDER)"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise UnsupportedError("an engine's memory cannot be copied; call init_inference again for a second engine")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedError(
            "an engine cannot be pickled; save it with init_inference(..., save_mp_checkpoint_path=FOLDER), or call "
            "init_inference in the other process"
        )
