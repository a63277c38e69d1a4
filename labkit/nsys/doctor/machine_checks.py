"""The doctor's checks of the machine and its software, which also matter without a profiler."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import labkit
from labkit.nsys.doctor.check import DoctorCheck, Status
from labkit.nsys.doctor.inventory import FACTS
from labkit.nsys.doctor.memory_mode import memory_mode
from labkit.nsys.process import run
from labkit.nsys.tool import DOWNLOAD, Nsys
from labkit.statistics.kept_resolutions import KeptResolution, kept_resolutions
from labkit.system.cgroups import own_groups
from labkit.system.processors import cpu_quota

CPUS = Path("/sys/devices/system/cpu")
INVENTORY_S = 300  # torch from a cold disk, and a first compilation of the kernels
DRIVERS = "https://www.nvidia.com/drivers"
PYTORCH = "https://pytorch.org/get-started/locally"
THREAD_LIMITS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
THREAD_SETTINGS = (*THREAD_LIMITS, "OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
NO_DEVICE = 100
CU_INIT = {  # results of cuInit other than "started" and "no device"
    802: ("the GPUs' fabric is not up", "sudo systemctl start nvidia-fabricmanager"),
    803: ("its library and its kernel module differ in version", "sudo reboot (an update of the driver is half done)"),
    804: ("this GPU does not support the compatibility library of a newer CUDA", f"update the driver: {DRIVERS}"),
    999: ("an unknown error", "nvidia-smi says more; sudo modprobe nvidia-uvm often helps, else reboot"),
}
UNKNOWN = "not measured yet; labkit doctor --resolution does it in about a minute"
Fact = Mapping[str, Any]


@dataclass(frozen=True)
class Inventory:
    """The facts of `labkit.nsys.doctor.inventory`, which runs in a process of its own, since loading may crash it."""

    facts: Mapping[str, Fact]

    def __getitem__(self, name: str) -> Fact:
        if name not in self.facts:
            raise OSError("the process that collects the facts ended before this one")
        return self.facts[name]

    def need(self, name: str) -> Fact:
        """The fact `name`, for a check that depends on it. Raises OSError if it was not found."""
        if error := self[name].get("error"):
            raise OSError(f"{name}: {error}")
        return self[name]


def take_inventory() -> Inventory:
    command = [sys.executable, "-P", "-m", "labkit.nsys.doctor.inventory"]
    output: list[str] = []
    ended = run(command, os.environ, timeout_s=INVENTORY_S, echo=output.append)
    if ended.interrupted:
        raise KeyboardInterrupt
    written = [json.loads(line) for line in output if line.startswith('{"fact"')]
    facts = {fact["fact"]: fact for fact in written}
    undone = [fact.__name__ for fact in FACTS if fact.__name__ not in facts]
    if undone:
        reason = f"no answer after {INVENTORY_S} s" if ended.late else f"Python ends with exit code {ended.exit_code}"
        facts[undone[0]] = {"error": reason}
    return Inventory(facts)


def python() -> DoctorCheck:
    return DoctorCheck(
        "Python", Status.OK, f"{platform.python_version()}, labkit {labkit.__version__}, {sys.executable}"
    )


def gpu(inventory: Inventory) -> DoctorCheck:
    fact = inventory["driver"]
    if names := fact.get("gpus"):
        return DoctorCheck("GPU", Status.OK, ", ".join(names))
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and any(Path("/dev").glob("nvidia[0-9]*")):
        finding, repair = f"CUDA_VISIBLE_DEVICES={hidden!r} hides it", "unset CUDA_VISIBLE_DEVICES"
    elif "error" in fact:
        finding, repair = f"none: {fact['error']}", f"for a GPU, install NVIDIA's driver: {DRIVERS}"
    else:
        finding = "none, though the driver's library is there"
        repair = "use a machine with a GPU, and pass its devices on to a container (docker run --gpus all)"
    return DoctorCheck("GPU", Status.WARN, f"{finding}; everything runs on the CPU", repair)


def driver(inventory: Inventory, nsys: Nsys | None) -> DoctorCheck:
    """Checks that the driver, PyTorch's CUDA, and the CUPTI with which nsys traces CUDA fit each other."""
    name, fact = "driver and CUDA", inventory["driver"]
    if reason := CU_INIT.get(fact.get("cu_init", NO_DEVICE)):
        return DoctorCheck(name, Status.FAIL, f"the driver does not start: {reason[0]}", reason[1])
    if not fact.get("gpus"):
        return DoctorCheck(name, Status.OK, "nothing to match without a GPU")
    torch, served = inventory.need("torch"), tuple(fact["cuda"])
    built = _numbers(torch["cuda"] or "")
    text = (
        f"the driver serves CUDA {_dotted(served)}, PyTorch {torch['version']} is built for {_dotted(built) or 'none'}"
    )
    if not built:
        return DoctorCheck(name, Status.FAIL, text, f"install PyTorch's CUDA build: {PYTORCH}")
    if built[0] > served[0]:
        repair = f"update the driver ({DRIVERS}), or install PyTorch for CUDA {_dotted(served)} or older ({PYTORCH})"
        return DoctorCheck(name, Status.FAIL, text, repair)
    if not torch["gpu"]:
        repair = f"{sys.executable} -c 'import torch; torch.cuda.init()' says why"
        return DoctorCheck(name, Status.FAIL, f"{text}, and finds no GPU", repair)
    cupti = max((_numbers(path.name) for path in nsys.folder.glob("libcupti.so.*")), default=()) if nsys else ()
    if cupti:
        text += f", nsys brings CUPTI for {_dotted(cupti)}"
    if cupti and cupti[0] < max(served[0], built[0]):
        repair = f"install an Nsight Systems that knows CUDA {max(served[0], built[0])}: {DOWNLOAD}"
        return DoctorCheck(name, Status.WARN, f"{text}: a capture may hold no CUDA rows", repair)
    return DoctorCheck(name, Status.OK, text)


def torch(inventory: Inventory) -> DoctorCheck:
    fact = inventory["torch"]
    if error := fact.get("error"):
        return DoctorCheck(
            "PyTorch", Status.FAIL, f"can't be imported: {error}", f"{sys.executable} -m pip install torch"
        )
    return DoctorCheck("PyTorch", Status.OK, f"{fact['version']}, CUDA {fact['cuda'] or 'none'}")


def triton(inventory: Inventory) -> DoctorCheck:
    fact, has_gpu = inventory["triton"], bool(inventory["driver"].get("gpus"))
    if error := fact.get("error"):
        status = Status.FAIL if has_gpu else Status.WARN
        finding = f"can't be imported: {error}; the GPU kernels need it"
        return DoctorCheck("Triton", status, finding, f"{sys.executable} -m pip install triton")
    return DoctorCheck("Triton", Status.OK, fact["version"] + ("" if has_gpu else ", in its interpreter only: no GPU"))


def compiler(inventory: Inventory) -> DoctorCheck:
    inventory.need("torch")
    fact = inventory["kernels"]
    if error := fact.get("error"):
        named = [name for name in ("LABKIT_ISA", "LABKIT_CACHE", "CXX") if name in error and name in os.environ]
        repair = f"unset {named[0]}" if named else "sudo apt-get install g++ (or name a C++17 compiler in CXX)"
        return DoctorCheck("CPU kernels", Status.FAIL, error, repair)
    return DoctorCheck("CPU kernels", Status.OK, f"compiled by {fact['compiler']} for {fact['instruction_set']}")


def memory(inventory: Inventory) -> DoctorCheck:
    inventory.need("kernels")
    return memory_mode(inventory.need("memory"))


def resolution() -> DoctorCheck:
    """The smallest differences that this machine tells apart, as kept, or how to measure them."""
    return resolution_check(kept_resolutions())


def resolution_check(kept: Sequence[KeptResolution]) -> DoctorCheck:
    """The check for these resolutions."""
    finding = "; ".join(f"this machine tells {resolution}" for resolution in kept)
    figures = tuple(resolution.as_dict() for resolution in kept)
    return DoctorCheck("resolution", Status.OK, finding or UNKNOWN, figures=figures)


def openmp(inventory: Inventory) -> DoctorCheck:
    """Checks that PyTorch and the kernels share one runtime: two runtimes would each start a team of threads."""
    libraries = inventory.need("openmp")["libraries"]
    kinds = {"libgomp": "GNU", "libomp": "LLVM", "libiomp5": "Intel"}
    named = [f"{kinds.get(re.split('[-.]', Path(path).name)[0], 'unknown')} ({path})" for path in libraries]
    if len(libraries) > 1:
        finding = f"{len(libraries)} runtimes in one process, each with threads of its own: {', '.join(named)}"
        return DoctorCheck(
            "OpenMP", Status.WARN, finding, "export CXX=g++ (and remove OpenMP runtimes from LD_PRELOAD)"
        )
    return DoctorCheck("OpenMP", Status.OK, named[0] if named else "none loaded")


def threads(inventory: Inventory) -> DoctorCheck:
    """Compares PyTorch's threads with the cores that this process may use."""
    used = inventory.need("torch")["threads"]
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(own_groups("cpu"))
    cores = min(allowed, math.ceil(quota)) if quota else allowed
    physical = min(cores, psutil.cpu_count(logical=False) or cores)
    settings = [f"{name}={os.environ[name]}" for name in THREAD_SETTINGS if name in os.environ]
    limited = f" (a quota of {quota:g} of {allowed})" if quota and quota < allowed else ""
    finding = ", ".join([f"threads of PyTorch: {used}, cores: {cores}{limited}", *settings])
    if used > cores:
        return DoctorCheck("threads", Status.WARN, f"{finding}: too many", f"export OMP_NUM_THREADS={physical}")
    limits = [name for name in THREAD_LIMITS if name in os.environ]
    if used < physical and limits:
        return DoctorCheck("threads", Status.WARN, f"{finding}: cores stay idle", f"unset {' '.join(limits)}")
    return DoctorCheck("threads", Status.OK, finding)


def governor() -> DoctorCheck:
    governors = {path.read_text().strip() for path in CPUS.glob("cpu*/cpufreq/scaling_governor")}
    if not governors:
        return DoctorCheck("CPU frequency", Status.OK, "no governor is visible: the host or the firmware decides")
    finding = f"governor {', '.join(sorted(governors))}"
    if "powersave" in governors:
        return DoctorCheck("CPU frequency", Status.WARN, finding, "sudo cpupower frequency-set --governor performance")
    return DoctorCheck("CPU frequency", Status.OK, finding)


def huge_pages() -> DoctorCheck:
    choices = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    chosen = re.search(r"\[(\w+)\]", choices)
    return DoctorCheck("huge pages", Status.OK, f"transparent huge pages: {chosen[1] if chosen else choices.strip()}")


def _numbers(version: str) -> tuple[int, ...]:
    """(12, 4) for "12.4" or "libcupti.so.12.4"."""
    return tuple(int(digits) for digits in re.findall(r"\d+", version)[:2])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
