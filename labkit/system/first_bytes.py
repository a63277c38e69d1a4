"""Recognises empty files and pointers of Git LFS by their first bytes."""

from __future__ import annotations

from pathlib import Path

from labkit.system.input_file import open_file

HEAD = 1024  # bytes
POINTER = b"version https://git-lfs"


def first_bytes(path: Path, expected: str) -> bytes:
    """The first bytes of a file. Errors: as `open_file`."""
    with open_file(path, expected) as file:
        return file.read(HEAD)


def instead_of_content(head: bytes) -> str:
    """Says that a file with these first bytes is empty or a pointer of Git LFS, and what to do; "" for other files."""
    if head.startswith(POINTER):
        return "is a pointer of Git LFS, not the file itself; fetch that: git lfs pull"
    return "" if head else "is empty: it was cut short, or the disk was full; get it again"
