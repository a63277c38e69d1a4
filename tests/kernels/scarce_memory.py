"""Calls the C++ kernels with less and less memory, in a process of its own; prints how many raised MemoryError.

Then opens a stream of layers without memory for the stack of a thread; prints the error.
"""

import resource
import sys
from pathlib import Path

import torch
from helpers.kernels.ops import Draw

from labkit.kernels import build, gemm
from labkit.kernels.layer_stream import PAGE, Block, LayerStream, digest_of
from labkit.system.errors import RunError

ROWS, STEP = 400_000, 16  # rows; bytes of a row, less than any buffer of a call has
THREAD_STACK = 3 << 20  # bytes that are left: less than a thread's stack takes


def main() -> None:
    torch.set_num_threads(1)
    _, linear = Draw().linear(1, 1)
    x = torch.ones(ROWS, 1)
    gemm(x[:1], linear, threads=2, impl="cpp")  # starts the threads
    used, failures = used_bytes(), 0
    for limit in range(0, 2000, STEP):
        resource.setrlimit(resource.RLIMIT_AS, (used + limit * ROWS, resource.RLIM_INFINITY))
        try:
            gemm(x, linear, threads=2, impl="cpp")
        except MemoryError:
            failures += 1
        except RuntimeError as error:  # torch has no memory for the result
            if "memory" not in str(error):
                raise
        else:
            break
    sys.stdout.write(f"{failures}\n")
    sys.stdout.write(stream_without_a_thread())


def stream_without_a_thread() -> str:
    """The error of a stream that cannot start its thread."""
    file, library = Path(sys.argv[1]), build.in_use("float32")
    file.write_bytes(bytes(PAGE))
    blocks = [Block(0, 0, PAGE, digest_of(library, torch.zeros(PAGE, dtype=torch.uint8)))]
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    other = LayerStream(library, file, blocks, 1)  # open, or its thread would leave its stack for the next one
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes() + THREAD_STACK, resource.RLIM_INFINITY))
    try:
        LayerStream(library, file, blocks, 1)
    except RunError as error:
        return str(error)
    finally:
        other.close()
    return "no error"


def used_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
