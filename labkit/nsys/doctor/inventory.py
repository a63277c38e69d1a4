"""Facts that need libraries to be loaded: the GPU's driver, PyTorch, Triton, the kernels, the memory's rate, OpenMP.

`labkit doctor` runs this in a process of its own (`python -P -m labkit.nsys.doctor.inventory`), because the doctor must
not load torch, and must not die if torch does. Each fact is written as a JSON line as soon as it is known. A fact that
can't be found is {"error": reason}.
"""

import ctypes
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

LOOKS, LOOK_S = 10, 0.1  # measurements of memory, whose mode may change within a second


def driver() -> dict[str, Any]:
    """The CUDA version that the NVIDIA driver serves, and the GPUs that it lets this process use."""
    cuda = ctypes.CDLL("libcuda.so.1")
    version, count, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(128)
    cuda.cuDriverGetVersion(ctypes.byref(version))
    started = cuda.cuInit(0)
    if started == 0:
        cuda.cuDeviceGetCount(ctypes.byref(count))
    names = []
    for device in range(count.value):
        cuda.cuDeviceGetName(name, len(name), device)
        names.append(name.value.decode())
    return {"cuda": [version.value // 1000, version.value % 1000 // 10], "gpus": names, "cu_init": started}


def torch() -> dict[str, Any]:
    import torch

    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "gpu": torch.cuda.is_available(),
        "threads": torch.get_num_threads(),
    }


def triton() -> dict[str, Any]:
    import triton

    return {"version": triton.__version__}


def kernels() -> dict[str, Any]:
    from labkit.kernels import build

    build.load("float32")
    return {"compiler": " ".join(build.compiler()), "instruction_set": build.instruction_set()}


def memory() -> dict[str, Any]:
    """GB/s at which memory is read, in each of LOOKS measurements, by the number of threads that an engine uses."""
    from torch import get_num_threads

    from labkit.kernels.probe import read_bandwidth_gb_s
    from labkit.system.processors import usable_processors

    threads = min(get_num_threads(), usable_processors())
    rates = [read_bandwidth_gb_s(threads, LOOK_S) for _ in range(LOOKS)]
    return {"threads": threads, "gb_s": rates}


def openmp() -> dict[str, Any]:
    """The OpenMP runtimes in this process, now that PyTorch and the kernels are loaded."""
    mapped = {line[line.index("/") :] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    names = ("libgomp", "libomp", "libiomp")
    return {"libraries": sorted(path for path in mapped if Path(path).name.startswith(names))}


FACTS: tuple[Callable[[], dict[str, Any]], ...] = (driver, torch, triton, kernels, memory, openmp)


def main() -> None:
    for fact in FACTS:
        try:
            values = fact()
        except (ImportError, OSError, RuntimeError, AttributeError) as error:
            values = {"error": f"{error}".partition("\n")[0] or type(error).__name__}
        sys.stdout.write(json.dumps({"fact": fact.__name__} | values) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
