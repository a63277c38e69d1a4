"""The machine and the software of a measurement, without the names of the user and the host."""

from __future__ import annotations

import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from labkit.harness.frozen_record import FrozenRecord
from labkit.kernels.build import BuildError, compiler
from labkit.kernels.gpu import CPU, gpu_name
from labkit.system.processor import cpu_flags, cpu_name
from labkit.system.processors import physical_cores

KERNEL_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "bf16", "sve")
UNITS = {"K": 10, "M": 20}
PACKAGES = ("torch", "transformers", "triton", "labkit")


class Environment(FrozenRecord):
    """Influences on timings other than the code under test. A field is None where the system does not report it."""

    system: str
    cpu: str
    cpu_flags: tuple[str, ...]
    cores: int
    threads: int
    memory_gb: float
    governor: str | None
    transparent_huge_pages: str | None
    load_average: float
    python: str
    packages: dict[str, str]
    compiler: str | None  # of the kernels
    commit: str | None
    gpu: str | None = None  # None: the CPU computed, as in all records from before GPUs were supported
    gpu_memory_gb: float | None = None
    driver: str | None = None  # of the GPU
    cuda: str | None = None  # the version that PyTorch was built with
    cache_mb: float | None = None  # the processors' largest cache; None also in older records

    @property
    def versions(self) -> str:
        """The packages, "torch 2.13.0, triton 3.9.0"."""
        return ", ".join(f"{package} {version}" for package, version in self.packages.items())

    @property
    def origin(self) -> str:
        """Processor, packages, compiler and commit, for the last line of a page."""
        return f"{self.cpu}; {self.versions}; {self.compiler}; commit {self.commit}"

    @property
    def machine(self) -> str:
        """The machine in one line, for the foot of a table or a figure."""
        if self.gpu is not None:
            memory = "" if self.gpu_memory_gb is None else f" ({self.gpu_memory_gb:.0f} GB)"
            return f"{self.gpu}{memory}, {self.cpu}, {self.cores} cores, {self.memory_gb:.0f} GB"
        return f"{self.cpu}, {self.threads} of {self.cores} cores, {self.memory_gb:.0f} GB"


def last_level_cache() -> int:
    """Bytes of this machine's largest cache; 32 MiB where the system does not report it."""
    return _known_cache() or 32 << 20


def read_environment(threads: int) -> Environment:
    """The present environment of work on `threads` threads, or on the current GPU where there is one."""
    flags = cpu_flags()
    return Environment(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=cpu_name(),
        cpu_flags=tuple(flag for flag in KERNEL_FLAGS if flag in flags),
        cores=physical_cores(),
        threads=threads,
        memory_gb=round(psutil.virtual_memory().total / 1e9, 1),
        governor=_first_line("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        transparent_huge_pages=_chosen(_first_line("/sys/kernel/mm/transparent_hugepage/enabled")),
        load_average=round(psutil.getloadavg()[0], 2),
        python=platform.python_version(),
        packages={name: _version(name) for name in PACKAGES},
        compiler=_compiler(),
        commit=commit_of(Path(__file__).parents[2]),
        cache_mb=None if (cache := _known_cache()) is None else cache / 1e6,
        **_gpu(),
    )


class Memory(NamedTuple):
    """Bytes of this process in RAM, or of its tensors on a GPU: now, and the peak since the last reset."""

    now: int
    peak: int


def read_memory(device: torch.device = CPU) -> Memory:
    """Resident bytes of this process, or the bytes that PyTorch has allocated on a GPU. The peak is the present number
    where the system keeps no peak.
    """
    if device.type == "cuda":
        return Memory(torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device))
    now = psutil.Process().memory_info().rss
    peak = re.search(r"VmHWM:\s+(\d+) kB", _text("/proc/self/status") or "")
    return Memory(now, int(peak[1]) * 1024 if peak else now)


def anonymous_memory(pid: int | None = None) -> int:
    """Resident bytes of a process that are not pages of a file; by default of this process. The number includes pages
    of files where the system does not count them apart. It is 0 for a process that has ended.
    """
    match = re.search(r"RssAnon:\s+(\d+) kB", _text(f"/proc/{pid or 'self'}/status") or "")
    if match:
        return int(match[1]) * 1024
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def reset_peak_memory(device: torch.device = CPU) -> None:
    """Resets the peak to the present use. Does nothing without Linux, or without the permission."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def _known_cache() -> int | None:
    sizes = [_first_line(str(path)) for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    known = [int(size[:-1]) << UNITS[size[-1]] for size in sizes if size and size[-1] in UNITS]
    return max(known, default=None)


def _text(path: str) -> str | None:
    try:
        return Path(path).read_text()
    except OSError:
        return None


def _first_line(path: str) -> str | None:
    return (_text(path) or "").partition("\n")[0].strip() or None


def _chosen(choices: str | None) -> str | None:
    """The bracketed word of "always [madvise] never"."""
    chosen = re.search(r"\[(\w+)\]", choices or "")
    return chosen[1] if chosen else choices


def _gpu() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {}
    return {
        "gpu": gpu_name(),
        "gpu_memory_gb": round(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / 1e9, 1),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda,
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _compiler() -> str | None:
    try:
        return _output(*compiler(), "--version")
    except BuildError:
        return None


def commit_of(root: Path) -> str | None:
    """The commit of a checkout of labkit, with "-dirty" where it has changes; None for an installed package."""
    return _output("git", "-C", str(root), "describe", "--always", "--dirty") if (root / ".git").exists() else None


def _output(*command: str) -> str | None:
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout.partition("\n")[0].strip() or None if process.returncode == 0 else None
