"""Calls the C++ kernels with less and less memory, in a process of its own; prints how many raised MemoryError."""

import resource
import sys

import torch
from helpers.kernels.ops import Draw

from labkit.kernels import gemm

ROWS, STEP = 400_000, 16  # rows; bytes of a row, less than any buffer of a call has


def main() -> None:
    torch.set_num_threads(1)
    _, linear = Draw().linear(1, 1)
    x = torch.ones(ROWS, 1)
    gemm(x[:1], linear, threads=2, impl="cpp")  # starts the threads
    with open("/proc/self/statm") as file:
        used_bytes = int(file.read().split()[0]) * resource.getpagesize()
    failures = 0
    for limit in range(0, 2000, STEP):
        resource.setrlimit(resource.RLIMIT_AS, (used_bytes + limit * ROWS, resource.RLIM_INFINITY))
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


if __name__ == "__main__":
    main()
