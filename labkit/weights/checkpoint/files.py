"""Files of tensors. They are mapped instead of read, and no code in a pickle is run."""

from __future__ import annotations

import pickle
import zipfile
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from labkit.system.errors import UserError, first_line
from labkit.system.first_bytes import first_bytes, instead_of_content
from labkit.system.mapped_file import require_mapped
from labkit.system.shown import shown_value
from labkit.weights.protocol import require_floats

MOST_LEVELS = 32  # of nested dicts; Megatron's have five
MOST_VALUES = 1 << 18  # in nested dicts; a dict that is nested in several places counts each time
OF_TORCH = (b"PK", b"\x80")  # first bytes of a zip archive, and of the pickle in files from before torch 1.6
REBUILD_ARRAY = np.empty(0).__reduce__()[0]
# Megatron stores its arguments and the state of random generators with the tensors. These classes hold data only.
HARMLESS: list[Any] = [Namespace, np.ndarray, np.dtype, type(np.dtype(np.uint32))]
HARMLESS += [(REBUILD_ARRAY, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]


class TensorFile:
    """The tensors of one safetensors or PyTorch file, by their names in the file.

    The tensors of a PyTorch file are mapped too, if torch 1.6 or later wrote it. The names of nested dicts are joined
    with dots; `other` has the values that are no tensors. Raises UserError for a file that is missing or damaged, or
    that holds anything besides data.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.other: dict[str, Any] = {}
        self._loaded: dict[str, Tensor] | None = None
        if not path.is_file() and not path.is_fifo():  # a pipe is refused where it is opened
            raise UserError(f"{path} is missing; copy it there, or check the list of files and base_dir")
        self._head = first_bytes(path, "a file of tensors")
        if path.suffix == ".safetensors":
            with self._opened() as tensors:
                self._names = set(tensors.keys())
        else:
            self._loaded = self._flatten(self._unpickled())
            self._names = set(self._loaded)

    def names(self) -> set[str]:
        return self._names

    def get(self, name: str) -> Tensor:
        """The tensor as it is stored, mapped from the file. Raises UserError unless it is dense and floating-point."""
        return require_floats(self._get(name), name, f"in {self.path}")

    def bytes(self, name: str) -> Tensor:
        """A tensor of bytes, mapped from the file. Raises UserError for another type."""
        tensor = self._get(name)
        if tensor.dtype != torch.uint8 or tensor.layout != torch.strided:
            raise UserError(f"{name} is stored as {tensor.dtype} in {self.path}; expected bytes: download it again")
        return tensor

    def _get(self, name: str) -> Tensor:
        if self._loaded is not None:
            return self._loaded[name]
        with self._opened() as tensors:
            tensor: Tensor = tensors.get_tensor(name)
        return tensor

    def present(self, tensor: Tensor) -> Tensor:
        """Returns a tensor of this file, or a part of it. UserError if the file has become shorter than that."""
        if tensor.numel():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            require_mapped(tensor.data_ptr(), (last + 1) * tensor.element_size(), self.path)
        return tensor

    def _flatten(self, whole: Any) -> dict[str, Tensor]:
        """The tensors in nested dicts, by their joined names; all other values go to `other`."""
        if not isinstance(whole, dict):
            raise UserError(f"{self.path} holds a {type(whole).__name__}; expected a state dict")
        tensors: dict[str, Tensor] = {}
        pending = [("", whole, 0)]
        for _ in range(MOST_VALUES):
            if not pending:
                return tensors
            prefix, value, level = pending.pop()
            if isinstance(value, Tensor):
                tensors[prefix.removesuffix(".")] = value.detach()
            elif not isinstance(value, dict):
                self.other[prefix.removesuffix(".")] = value
            elif level == MOST_LEVELS:
                break
            else:
                pending += [(f"{prefix}{key}.", inner, level + 1) for key, inner in value.items()]
        raise UserError(
            f"{self.path} has more than {MOST_VALUES} values or {MOST_LEVELS} levels of dicts; expected a state dict"
        )

    def _unpickled(self) -> Any:
        try:
            with torch.serialization.safe_globals(HARMLESS):
                return torch.load(self.path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(self.path))
        except pickle.UnpicklingError as error:
            if "weights_only" not in str(error).lower() or not self._head.startswith(OF_TORCH):
                raise self._damaged(error) from error
            raise UserError(
                f"{self.path} holds more than tensors and numbers ({_reason(error)}); labkit runs no code of a "
                "checkpoint: have its author save the state dict alone, or as safetensors"
            ) from None
        except Exception as error:  # torch's reader of pickles can raise errors of any kind
            raise self._damaged(error) from error

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        try:
            opened = safe_open(self.path, framework="pt")
        except SafetensorError as error:
            raise self._damaged(error) from error
        with opened as tensors:
            yield tensors

    def _damaged(self, error: Exception) -> UserError:
        if fault := instead_of_content(self._head):
            return UserError(f"{self.path} {fault}")
        of_safetensors = self.path.suffix == ".safetensors"
        kind = "safetensors" if of_safetensors else "PyTorch"
        if not (self._head[8:9] == b"{" if of_safetensors else self._head.startswith(OF_TORCH)):
            return UserError(
                f"{self.path} begins with {shown_value(self._head[:16])}, so it is no {kind} file; download it again"
            )
        reason = "it ends too early" if isinstance(error, EOFError) else first_line(error)
        return UserError(f"{self.path} cannot be read ({reason}); download it again")


def _reason(error: Exception) -> str:
    """The line of torch's message that says what it refused; the other lines advise how to trust the file."""
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line for line in lines if "GLOBAL" in line or "Unsupported" in line), lines[0])
