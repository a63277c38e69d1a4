"""Arguments of the kernels' C functions for the judge, made from torch's tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from labkit.harness.judge.arrays import BFLOAT16, Input, Record, Result


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of a record and of the records in it."""
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        for of in fields(value):
            yield from _tensors(getattr(value, of.name))


def input_of(tensor: Tensor) -> Input:
    """An argument that is read."""
    return Input(_numbers(tensor), BFLOAT16 if tensor.dtype == torch.bfloat16 else "")


def result_of(tensor: Tensor) -> Result:
    """Room for a result with the tensor's present numbers."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Result(tuple(tensor.shape), dtype, _numbers(tensor))


def _numbers(tensor: Tensor) -> NDArray[Any]:
    if tensor.dtype == torch.bfloat16:  # numpy has no such type
        return tensor.contiguous().view(torch.int16).numpy().view(np.uint16)
    return tensor.contiguous().numpy()


def pointers_to(*records: Any) -> dict[int, Input | Result]:
    """The tensors of records by their addresses."""
    return {tensor.data_ptr(): input_of(tensor) for record in records for tensor in _tensors(record)}


def record_of(struct: ctypes.Structure, arrays: Mapping[int, Input | Result]) -> Record:
    """A struct whose pointers lead to these arrays, which are named by their present addresses."""
    content, pointers = bytearray(bytes(struct)), {}
    for offset, address in _addresses(struct):
        content[offset : offset + 8] = bytes(8)
        pointers[offset] = arrays[address]
    return Record(bytes(content), pointers)


def _addresses(struct: ctypes.Structure, begin: int = 0) -> Iterator[tuple[int, int]]:
    """The offset and the value of each pointer that is not null, in the structs within `struct` too."""
    for name, kind, *_ in struct._fields_:
        offset, value = begin + getattr(type(struct), name).offset, getattr(struct, name)
        if isinstance(value, ctypes.Structure):
            yield from _addresses(value, offset)
        elif kind is ctypes.c_void_p and value:
            yield offset, value


def padded(got: Tensor, result: Result) -> NDArray[np.float64]:
    """A result in float64, with zeros in the columns that the kernel adds."""
    missing = result.shape[-1] - got.shape[-1]
    return np.asarray(F.pad(got.double(), (0, missing)).reshape(result.shape).numpy())
