"""Arrays that a judged process shares with its judge.

Inputs are in a file in memory that the process can map only for reading. Results are in another one: they are filled
with NaN before a round, end at a forbidden page, and have a pattern of bytes around them that must stay.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.kernels.memory import HUGE_PAGE
from labkit.system.rounding import round_up

CANARY = 0xA5
ALIGNMENT = 64
FUTURE_WRITE = 0x10  # the seal F_SEAL_FUTURE_WRITE: no new mapping can write
BFLOAT16 = "bfloat16"  # numpy has no such type; its values are words, uint16
NAN = {"float32": np.nan, "float64": np.nan, "float16": np.nan, BFLOAT16: 0x7FC0}
UNWRITTEN = 0x5B  # each byte of a result whose type has no NaN


@dataclass(frozen=True, eq=False)
class Input:
    """Values that a call reads. `dtype`: "bfloat16" for words; empty: that of the values."""

    values: NDArray[Any]
    dtype: str = ""


@dataclass(frozen=True, eq=False)
class Result:
    """Room for values that a call writes.

    initial: its content before a round; None: NaN.
    checked: whether its values are checked; a state that calls pass on need not be.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    initial: NDArray[Any] | None = None
    checked: bool = True

    def empty(self) -> NDArray[Any]:
        """The content before a round."""
        if self.initial is not None:
            return self.initial
        values = np.empty(self.shape, "uint16" if self.dtype == BFLOAT16 else self.dtype)
        if self.dtype in NAN:
            values.fill(NAN[self.dtype])
        else:
            values.view(np.uint8).fill(UNWRITTEN)
        return values


@dataclass(frozen=True)
class Record:
    """A C struct, which is passed by its address.

    content: its bytes; pointers to arrays are zero.
    pointers: to arrays, by their offset in the struct.
    """

    content: bytes
    pointers: Mapping[int, Input | Result]


@dataclass(frozen=True)
class JudgedCall:
    """The arguments of one call, in order; None is a null pointer. The same `Input` or `Result` may be an argument of
    several calls.
    """

    arguments: tuple[Input | Result | Record | int | float | None, ...]

    @property
    def arrays(self) -> Iterator[Input | Result]:
        """The arrays of all arguments, in order."""
        for argument in self.arguments:
            if isinstance(argument, Record):
                yield from argument.pointers.values()
            elif isinstance(argument, Input | Result):
                yield argument

    @property
    def inputs(self) -> list[NDArray[Any]]:
        return [array.values for array in self.arrays if isinstance(array, Input)]

    @property
    def checked(self) -> list[Result]:
        """The results whose values are checked."""
        return [array for array in self.arrays if isinstance(array, Result) and array.checked]


@dataclass
class ArraySlot:
    """The place of an array in a file in memory. A worker maps `pages` from `offset` on; the array is in the last
    `bytes` of them, `begin` bytes after the first one, at an address that ALIGNMENT divides. Large arrays have huge
    pages of their own.
    """

    index: int
    offset: int
    pages: int
    begin: int
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    writable: bool
    file: int = -1  # descriptor

    @property
    def end(self) -> int:
        return self.begin + self.bytes


class _File:
    """A file in memory that grows by slots until it is mapped."""

    def __init__(self, name: str) -> None:
        self._name, self._size = name, mmap.PAGESIZE
        self.descriptor = -1

    def slot(self, index: int, values: NDArray[Any], dtype: str, *, writable: bool) -> ArraySlot:
        unit = HUGE_PAGE if values.nbytes >= HUGE_PAGE else mmap.PAGESIZE
        pages = round_up(values.nbytes + ALIGNMENT, unit) // mmap.PAGESIZE
        begin = (pages * mmap.PAGESIZE - values.nbytes) // ALIGNMENT * ALIGNMENT
        offset = round_up(self._size, unit)
        self._size = offset + pages * mmap.PAGESIZE
        return ArraySlot(index, offset, pages, begin, values.nbytes, values.shape, dtype or values.dtype.name, writable)

    def map(self) -> None:
        self.descriptor = os.memfd_create(self._name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, self._size)
        self._bytes = np.frombuffer(mmap.mmap(self.descriptor, self._size), np.uint8)
        self.seal(fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)

    def seal(self, seals: int) -> None:
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)

    def clear(self) -> None:
        self._bytes.fill(0)

    def pages(self, slot: ArraySlot) -> NDArray[np.uint8]:
        return self._bytes[slot.offset : slot.offset + slot.pages * mmap.PAGESIZE]

    def write(self, slot: ArraySlot, values: NDArray[Any]) -> None:
        self.pages(slot)[slot.begin : slot.end] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)

    def read_all(self) -> None:
        """Reads every byte, with all threads that torch has."""
        import torch

        torch.from_numpy(self._bytes.view(np.int64)).sum()

    def read(self, slot: ArraySlot) -> NDArray[Any]:
        """A copy of the array; bfloat16 becomes float32."""
        copied = self.pages(slot)[slot.begin : slot.end].copy()
        if slot.dtype == BFLOAT16:
            return (copied.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(slot.shape)
        return copied.view(slot.dtype).reshape(slot.shape)

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class SharedArrays:
    """The arrays of all calls of a round. They are empty until they are filled."""

    def __init__(self, calls: Sequence[JudgedCall]) -> None:
        self._calls = calls
        self._inputs, self._results = _File("inputs"), _File("results")
        self._slots: dict[int, tuple[Input | Result, ArraySlot]] = {}  # by the identity of the argument
        for array in (array for call in calls for array in call.arrays):
            if id(array) not in self._slots:
                self._slots[id(array)] = array, self._slot(array)
        for file in (self._inputs, self._results):
            file.map()
        self._inputs.seal(FUTURE_WRITE)
        for _, slot in self._slots.values():
            slot.file = (self._results if slot.writable else self._inputs).descriptor

    def _slot(self, array: Input | Result) -> ArraySlot:
        if isinstance(array, Input):
            return self._inputs.slot(len(self._slots), array.values, array.dtype, writable=False)
        return self._results.slot(len(self._slots), array.empty(), array.dtype, writable=True)

    @property
    def input_bytes(self) -> int:
        """Bytes of all inputs, each counted once."""
        return sum(slot.bytes for array, slot in self._slots.values() if isinstance(array, Input))

    @property
    def files(self) -> tuple[int, int]:
        """Descriptors for the worker."""
        return self._inputs.descriptor, self._results.descriptor

    @property
    def described(self) -> dict[str, Any]:
        """The arrays, and the arguments of each call, as the worker takes them: an array is the index of its slot."""

        def index(array: Input | Result) -> int:
            return self._slots[id(array)][1].index

        def plain(argument: Input | Result | Record | float | None) -> Any:
            if isinstance(argument, Record):
                pointers = [[offset, index(array)] for offset, array in argument.pointers.items()]
                return {"record": argument.content.hex(), "pointers": pointers}
            return {"slot": index(argument)} if isinstance(argument, Input | Result) else argument

        return {
            "slots": [vars(slot) for _, slot in self._slots.values()],
            "calls": [[plain(argument) for argument in call.arguments] for call in self._calls],
        }

    def fill(self, *, other: bool = False) -> None:
        """Writes the values of all inputs, the initial values of all results, and the pattern around them. No process
        that maps them may run meanwhile: it could work ahead.

        other: writes other values, for a round that only warms up.
        """
        for argument, slot in self._slots.values():
            if isinstance(argument, Input):
                self._inputs.write(slot, np.flip(argument.values) if other else argument.values)
            else:
                self._results.pages(slot)[:] = CANARY
                self._results.write(slot, argument.empty())

    def clear(self) -> None:
        """Removes what another process has read and written, before a new one maps the arrays."""
        for file in (self._inputs, self._results):
            file.clear()

    def results(self) -> list[list[NDArray[Any]]]:
        """Copies of the checked results of each call."""
        return [[self._results.read(self._slots[id(result)][1]) for result in call.checked] for call in self._calls]

    def written_outside(self) -> str:
        """Which result has changed bytes around it, and where; empty: none."""
        for argument, slot in self._slots.values():
            if isinstance(argument, Result):
                pages = self._results.pages(slot)
                for around, where in (
                    (pages[: slot.begin], "before its beginning"),
                    (pages[slot.end :], "past its end"),
                ):
                    if (around != CANARY).any():
                        return f"a result of shape {list(slot.shape)}, {where}"
        return ""

    def read_s(self) -> float:
        """Seconds in which this process reads all inputs once: the least that a round has to do."""
        begin = perf_counter()
        self._inputs.read_all()
        return perf_counter() - begin

    def close(self) -> None:
        """Closes the files. The memory stays until nothing refers to this object."""
        for file in (self._inputs, self._results):
            file.close()
