"""The process that calls foreign code: `python -I [-S] worker.py ANSWERS_FD`.

It has the arguments of the calls and room for the results, and nothing that is worth stealing: no expected result, no
clock, no verdict. It takes a job, a message on stdin, confines itself, and loads the code. From then on each
byte on stdin stands for one round of all calls. It answers with one byte after each step. In a conversation the code is
called once, with an object whose methods the judge answers.

Without -S it finds numpy and torch, for code in Python.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import mmap
import os
import platform
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

if __name__ == "__main__":  # labkit is not on the path of this process
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import confinement  # type: ignore[import-not-found, unused-ignore]
else:
    from labkit.harness.judge import confinement

READY, DONE = b"r", b"d"
FAILED = 70  # exit code after an error in code in Python
MAP_SHARED, MAP_PRIVATE, MAP_FIXED, MAP_ANONYMOUS, MAP_NORESERVE, MAP_POPULATE = 0x01, 0x02, 0x10, 0x20, 0x4000, 0x8000
PROT_NONE, PROT_READ, PROT_WRITE = 0, 1, 2
HUGE_PAGE, MADV_COLLAPSE = 2 << 20, 25
PERMIT_AMX = 158, 0x1023, 18  # arch_prctl, ARCH_REQ_XCOMP_PERM, the tile registers
NUMBERS = {"i": ctypes.c_int64, "f": ctypes.c_float, "d": ctypes.c_double}


def address_of(slot: dict[str, Any]) -> int:
    """Maps an array into this process. Its memory ends at a page that cannot be touched."""
    libc = confinement.LIBC
    libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
    )  # fmt: skip
    size = slot["pages"] * mmap.PAGESIZE
    unit = HUGE_PAGE if size >= HUGE_PAGE else mmap.PAGESIZE
    reserved = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE
    begin = libc.mmap(None, size + 2 * unit, PROT_NONE, reserved, -1, 0)
    protection = PROT_READ | (PROT_WRITE if slot["writable"] else 0)
    inside = (begin // unit + 1) * unit
    shared = MAP_SHARED | MAP_FIXED | MAP_POPULATE  # no page is met for the first time in a timed round
    if libc.mmap(inside, size, protection, shared, slot["file"], slot["offset"]) != inside:
        raise MemoryError(f"{size} bytes could not be mapped")
    if unit == HUGE_PAGE:
        libc.madvise(ctypes.c_void_p(inside), ctypes.c_size_t(size), MADV_COLLAPSE)  # as in memory of its own
    return int(inside + slot["begin"])


def library(job: dict[str, Any], addresses: Sequence[int]) -> Callable[[], None]:
    """A round of calls of a C function. Arrays are pointers; whole numbers are int64."""
    function = getattr(ctypes.CDLL(job["code"]), job["function"])
    function.restype = None
    function.argtypes = [NUMBERS.get(kind, ctypes.c_void_p) for kind in job["kinds"]]
    calls = [[_argument(argument, addresses) for argument in call] for call in job["calls"]]

    def one_round() -> None:
        for arguments in calls:
            function(*arguments)

    return one_round


def _argument(argument: Any, arrays: Sequence[Any]) -> Any:
    if not isinstance(argument, dict):
        return argument
    return arrays[argument["slot"]] if "slot" in argument else _record(argument, arrays)


def _record(argument: dict[str, Any], addresses: Sequence[int]) -> Any:
    """A C struct with the addresses of its arrays."""
    content = bytearray.fromhex(argument["record"])
    for offset, slot in argument["pointers"]:
        content[offset : offset + 8] = addresses[slot].to_bytes(8, sys.byteorder)
    return ctypes.create_string_buffer(bytes(content), len(content))


def function_of(job: dict[str, Any]) -> Callable[..., Any]:
    """The function in Python that is judged."""
    spec = importlib.util.spec_from_file_location("submission", job["code"])
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules["submission"] = loaded
    spec.loader.exec_module(loaded)
    function: Any = getattr(loaded, job["function"])
    return function[tuple(job["grid"])] if job["language"] == "triton" else function


class Asked:
    """An object whose methods are answered by the judge, who learns the line that asks. Arguments and answers are what
    JSON has.
    """

    def __init__(self, answers: int) -> None:
        self._answers = answers

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def method(*arguments: Any) -> Any:
            question = {"ask": name, "arguments": arguments, "line": sys._getframe(1).f_lineno}
            os.write(self._answers, json.dumps(question).encode() + b"\n")
            return read_message()

        return method


def module(job: dict[str, Any], addresses: Sequence[int]) -> Callable[[], None]:
    """A round of calls of a function in Python. Arrays are tensors, or numpy's where torch was not asked for."""
    arrays = [_array(slot, address) for slot, address in zip(job["slots"], addresses, strict=True)]
    function = function_of(job)
    calls = [[_argument(argument, arrays) for argument in call] for call in job["calls"]]

    def one_round() -> None:
        for arguments in calls:
            function(*arguments)

    return one_round


def _array(slot: dict[str, Any], address: int) -> Any:
    """An array on the shared memory. What is only read cannot be written: it would end the process."""
    memory = (ctypes.c_char * slot["bytes"]).from_address(address)
    if "torch" in sys.modules:
        import torch

        dtype = getattr(torch, slot["dtype"])
        return (torch.frombuffer(memory, dtype=dtype) if slot["bytes"] else torch.empty(0, dtype=dtype)).view(
            slot["shape"]
        )
    import numpy as np

    values = np.frombuffer(memory, dtype=slot["dtype"]).reshape(slot["shape"])
    values.flags.writeable = slot["writable"]
    return values


def read_message() -> Any:
    """The next message on stdin: a line with the number of its bytes, then JSON. What follows belongs to others."""
    length = bytearray()
    while not length.endswith(b"\n"):
        length += read_some(1)
    message = bytearray()
    while len(message) < int(length):
        message += read_some(int(length) - len(message))
    return json.loads(message)


def read_some(most: int) -> bytes:
    """At least one byte of stdin. At the end of stdin the process ends."""
    if not (read := os.read(0, most)):
        os._exit(0)
    return read


def main() -> None:
    answers = int(sys.argv[1])
    job = read_message()
    for name in job["imports"]:
        importlib.import_module(name)
    if job["threads"] and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(job["threads"])
    addresses = [address_of(slot) for slot in job["slots"]]
    if platform.machine() == "x86_64":
        confinement.LIBC.syscall(*PERMIT_AMX)  # code in C++ may use the tiles of a processor that has them
    in_force = confinement.confine(job["readable"], job["memory_bytes"], job["processor_s"])
    os.write(answers, json.dumps(in_force).encode() + b"\n")
    if job["language"] == "conversation":
        result = function_of(job)(Asked(answers))
        os.write(answers, json.dumps({"result": result}).encode() + b"\n")
        return
    one_round = (library if job["language"] == "c++" else module)(job, addresses)
    os.write(answers, READY)
    while os.read(0, 1):
        one_round()
        os.write(answers, DONE)


if __name__ == "__main__":
    try:
        main()
    except BaseException:  # noqa: BLE001 - whatever foreign code raises
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(FAILED)
