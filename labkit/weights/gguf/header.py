"""The header of a GGUF file: its metadata, and the table of its tensors.

The file is mapped and its header walked once. All sizes in it are bounded: by the size of the file, and by limits that
no real file reaches. Strings stay bytes and lists stay in the file until `metadata.py` reads them.
"""

from __future__ import annotations

import math
import stat
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np

from labkit.system.errors import UserError
from labkit.system.first_bytes import HEAD, instead_of_content
from labkit.system.rounding import round_up
from labkit.system.shown import shown_value

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

MAGIC = b"GGUF"
BEFORE_SIZES = 8  # bytes of the magic and the version
VERSIONS = (2, 3)
MOST_BYTES = 1 << 26  # of metadata; the largest vocabularies with their merges take a quarter
MOST_ITEMS = 1 << 22  # of one list
MOST_KEYS = MOST_TENSORS = 1 << 16
MOST_NAME = (1 << 16) - 1  # bytes of a name
MOST_DIMENSIONS = 4
STRING, ARRAY = 8, 9  # types of a value that have no fixed size
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
ALIGNMENT = "general.alignment"


@dataclass(frozen=True)
class StringList:
    """A list of strings in a mapped file, read on iteration."""

    data: memoryview
    begin: int
    count: int

    def __iter__(self) -> Iterator[bytes]:
        data, at = self.data, self.begin
        for _ in range(self.count):
            (size,) = struct.unpack_from("<Q", data, at)
            yield bytes(data[at + 8 : at + 8 + size])
            at += 8 + size

    def __len__(self) -> int:
        return self.count


T = TypeVar("T")
Value: TypeAlias = int | float | bool | bytes | StringList | np.ndarray


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as a file has it."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]  # outputs first, as in PyTorch
    data: np.ndarray  # its bytes, mapped

    @property
    def rows(self) -> np.ndarray:
        """Rows of numbers for the types that NumPy has, rows of bytes for all other types."""
        numbers = {"F32": np.float32, "F16": np.float16}.get(self.kind.name)
        return self.data.view(numbers or np.uint8).reshape(*self.shape[:-1], -1)


@dataclass(frozen=True)
class Header:
    """The contents of a file before its numbers."""

    path: Path
    metadata: dict[str, Value]
    tensors: dict[str, StoredTensor]


def is_gguf(path: Path) -> bool:
    """Whether a file begins as a GGUF file does. Pipes and devices are not opened."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return False
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except (OSError, ValueError):  # ValueError: a name with a zero byte
        return False


def read_header(path: Path) -> Header:
    """The header of a file. Raises UserError for a file that is no GGUF, of another version, damaged or cut off."""
    data = _mapped(path)
    magic, version = bytes(data[:4]), int.from_bytes(data[4:8], "little")
    if 0 < len(data) < BEFORE_SIZES and MAGIC.startswith(magic):
        raise UserError(f"{path} is cut off after {len(data)} bytes; download or convert it again")
    if magic != MAGIC:
        if fault := instead_of_content(bytes(data[:HEAD])):
            raise UserError(f"{path} {fault}")
        raise UserError(f"{path} begins with {shown_value(magic)}, expected {shown_value(MAGIC)}: it is no GGUF file")
    if version not in VERSIONS:
        order = " in big-endian order" if int.from_bytes(data[4:8], "big") in VERSIONS else ""
        raise UserError(
            f"{path} is of GGUF version {version}{order}; expected {' or '.join(map(str, VERSIONS))} in little-endian "
            "order: convert it again"
        )
    walk = _Walk(data.data, BEFORE_SIZES)
    try:
        tensors, keys = walk.size(MOST_TENSORS, "tensors"), walk.size(MOST_KEYS, "keys")
        metadata = dict(_unique((walk.text(MOST_NAME).decode(), walk.value()) for _ in range(keys)))
        return Header(path, metadata, dict(_unique(_tensors(walk, tensors, _alignment(metadata), data))))
    except (ValueError, struct.error) as error:
        reason = "its header has no end" if isinstance(error, struct.error) else error
        raise UserError(f"{path} is damaged or cut off ({reason}); download or convert it again") from error


def _mapped(path: Path) -> np.ndarray:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UserError(f"{path} is no regular file; expected a GGUF file on a disk")
        return np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
    except OSError as error:
        raise UserError(f"{path} can't be read ({error.strerror}); expected a GGUF file") from None


class _Walk:
    """Reads one value after the other. Raises ValueError or struct.error where the file is too short or wrong."""

    def __init__(self, data: memoryview, at: int) -> None:
        self.data, self.at = data, at

    def number(self, kind: str) -> int | float | bool:
        (value,) = struct.unpack_from(f"<{kind}", self.data, self.at)
        self.at += struct.calcsize(f"<{kind}")
        if self.at > MOST_BYTES:
            raise ValueError(f"its header takes more than {MOST_BYTES >> 20} MiB")
        assert isinstance(value, int | float)
        return value

    def size(self, most: int, of: str) -> int:
        """A number of bytes or of items."""
        value = int(self.number("Q"))
        if value > min(most, len(self.data)):
            raise ValueError(f"{value} {of} in {len(self.data)} bytes")
        return value

    def text(self, most: int = MOST_BYTES) -> bytes:
        length = self.size(most, "bytes of a string")
        begin, self.at = self.at, self.at + length
        if self.at > len(self.data):
            raise ValueError("a string has no end")
        return bytes(self.data[begin : self.at])

    def value(self) -> Value:
        kind = int(self.number("I"))
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            return self._list()
        if kind not in NUMBERS:
            raise ValueError(f"a value of the unknown type {kind}")
        return self.number(NUMBERS[kind])

    def _list(self) -> Value:
        kind, count = int(self.number("I")), self.size(MOST_ITEMS, "items of a list")
        begin = self.at
        if kind == STRING:
            self._pass_texts(count)
            return StringList(self.data, begin, count)
        if kind not in NUMBERS:
            raise ValueError("a list of lists" if kind == ARRAY else f"a list of the unknown type {kind}")
        numbers = np.frombuffer(self.data, np.dtype(NUMBERS[kind]).newbyteorder("<"), count, begin)
        self.at += numbers.nbytes
        return numbers

    def _pass_texts(self, count: int) -> None:
        """Skips strings without making objects of them: a vocabulary has hundreds of thousands."""
        data, at, unpack = self.data, self.at, struct.Struct("<Q").unpack_from
        for _ in range(count):
            at += 8 + unpack(data, at)[0]
            if at > MOST_BYTES:
                raise ValueError(f"its header takes more than {MOST_BYTES >> 20} MiB")
        if at > len(data):
            raise ValueError("a string has no end")
        self.at = at


def _unique(pairs: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
    known: set[str] = set()
    for name, value in pairs:
        if name in known:
            raise ValueError(f"it has {name[:80]!r} twice")
        known.add(name)
        yield name, value


def _alignment(metadata: dict[str, Value]) -> int:
    alignment = metadata.get(ALIGNMENT, 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        got = repr(alignment)[:80] if isinstance(alignment, int | float | str) else "a list"
        raise ValueError(f"{ALIGNMENT} is {got}, expected a power of two")
    return alignment


def _tensors(walk: _Walk, count: int, alignment: int, data: np.ndarray) -> Iterator[tuple[str, StoredTensor]]:
    """The table of tensors. Their numbers follow it without holes, in its order."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    table = []
    for _ in range(count):
        name, dimensions = walk.text(MOST_NAME).decode(), int(walk.number("I"))
        if not 0 < dimensions <= MOST_DIMENSIONS:
            raise ValueError(f"{name[:80]!r} has {dimensions} dimensions, expected 1 to {MOST_DIMENSIONS}")
        shape = tuple(reversed([int(walk.number("Q")) for _ in range(dimensions)]))
        table.append((name, shape, int(walk.number("I")), int(walk.number("Q"))))
    begin, next_offset = round_up(walk.at, alignment), 0
    for name, shape, number, offset in table:
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise ValueError(f"{name[:80]!r} is of the unknown type {number}") from None
        block, size = GGML_QUANT_SIZES[kind]
        if 0 in shape or shape[-1] % block:
            raise ValueError(f"{name[:80]!r} of shape {list(shape)} has no whole blocks of {block} in {kind.name}")
        length = math.prod(shape) // block * size
        if offset != next_offset or begin + offset + length > len(data):
            raise ValueError(
                f"{name[:80]!r} of {length} bytes at {offset}, expected at {next_offset} of {max(len(data) - begin, 0)}"
            )
        next_offset += round_up(length, alignment)
        yield name, StoredTensor(name, kind, shape, data[begin + offset : begin + offset + length])
