"""The doctor's checks of the machine and of the software that runs on it, whether profiled or not."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import sys
from collections.abc import Mapping
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
Fact = Mapping[str, Any]


@dataclass(frozen=True)
class Inventory:
    """What `labkit.nsys.doctor.inventory` found. It runs in a process of its own, because loading things may end it."""

    facts: Mapping[str, Fact]

    def __getitem__(self, name: str) -> Fact:
        if name not in self.facts:
            raise OSError("the process that looked did not come this far")
        return self.facts[name]

    def need(self, name: str) -> Fact:
        """The same for a fact that another one depends on."""
        if error := self[name].get("error"):
            raise OSError(f"{name}: {error}")
        return self[name]


def take_inventory() -> Inventory:
    command = [sys.executable, "-P", "-m", "labkit.nsys.doctor.inventory"]
    said: list[str] = []
    ended = run(command, os.environ, timeout_s=INVENTORY_S, echo=said.append)
    if ended.interrupted:
        raise KeyboardInterrupt
    facts = {line["fact"]: line for line in map(json.loads, (line for line in said if line.startswith('{"fact"')))}
    undone = [fact.__name__ for fact in FACTS if fact.__name__ not in facts]
    if undone:
        how = f"no answer after {INVENTORY_S} s" if ended.late else f"Python ends with exit code {ended.exit_code}"
        facts[undone[0]] = {"error": how}
    return Inventory(facts)


def python() -> DoctorCheck:
    return DoctorCheck(
        "Python", Status.OK, f"{platform.python_version()}, labkit {labkit.__version__}, {sys.executable}"
    )


def gpu(inventory: Inventory) -> DoctorCheck:
    found = inventory["driver"]
    if names := found.get("gpus"):
        return DoctorCheck("GPU", Status.OK, ", ".join(names))
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and any(Path("/dev").glob("nvidia[0-9]*")):
        finding, repair = f"CUDA_VISIBLE_DEVICES={hidden!r} hides it", "unset CUDA_VISIBLE_DEVICES"
    elif "error" in found:
        finding, repair = f"none: {found['error']}", f"for a GPU, install NVIDIA's driver: {DRIVERS}"
    else:
        finding = "none, though the driver's library is there"
        repair = "take a machine that has one, with its devices passed on to a container (docker run --gpus all)"
    return DoctorCheck("GPU", Status.WARN, f"{finding}; everything runs on the CPU", repair)


def driver(inventory: Inventory, nsys: Nsys | None) -> DoctorCheck:
    """The driver, PyTorch's CUDA, and the CUPTI by which nsys traces CUDA have to fit each other."""
    name, found = "driver and CUDA", inventory["driver"]
    if reason := CU_INIT.get(found.get("cu_init", NO_DEVICE)):
        return DoctorCheck(name, Status.FAIL, f"the driver does not start: {reason[0]}", reason[1])
    if not found.get("gpus"):
        return DoctorCheck(name, Status.OK, "nothing to match without a GPU")
    torch, served = inventory.need("torch"), tuple(found["cuda"])
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
    found = inventory["torch"]
    if error := found.get("error"):
        return DoctorCheck(
            "PyTorch", Status.FAIL, f"can't be imported: {error}", f"{sys.executable} -m pip install torch"
        )
    return DoctorCheck("PyTorch", Status.OK, f"{found['version']}, CUDA {found['cuda'] or 'none'}")


def triton(inventory: Inventory) -> DoctorCheck:
    found, has_gpu = inventory["triton"], bool(inventory["driver"].get("gpus"))
    if error := found.get("error"):
        status = Status.FAIL if has_gpu else Status.WARN
        finding = f"can't be imported: {error}; the GPU kernels need it"
        return DoctorCheck("Triton", status, finding, f"{sys.executable} -m pip install triton")
    return DoctorCheck("Triton", Status.OK, found["version"] + ("" if has_gpu else ", in its interpreter only: no GPU"))


def compiler(inventory: Inventory) -> DoctorCheck:
    inventory.need("torch")
    found = inventory["kernels"]
    if error := found.get("error"):
        named = [name for name in ("LABKIT_ISA", "LABKIT_CACHE", "CXX") if name in error and name in os.environ]
        repair = f"unset {named[0]}" if named else "sudo apt-get install g++ (or name a C++17 compiler in CXX)"
        return DoctorCheck("CPU kernels", Status.FAIL, error, repair)
    return DoctorCheck("CPU kernels", Status.OK, f"compiled by {found['compiler']} for {found['instruction_set']}")


def memory(inventory: Inventory) -> DoctorCheck:
    inventory.need("kernels")
    return memory_mode(inventory.need("memory"))


def openmp(inventory: Inventory) -> DoctorCheck:
    """One runtime for PyTorch and the kernels: two would each start a team of threads."""
    libraries = inventory.need("openmp")["libraries"]
    kinds = {"libgomp": "GNU", "libomp": "LLVM", "libiomp5": "Intel"}
    named = [f"{kinds.get(re.split('[-.]', Path(each).name)[0], 'unknown')} ({each})" for each in libraries]
    if len(libraries) > 1:
        finding = f"{len(libraries)} runtimes in one process, each with threads of its own: {', '.join(named)}"
        return DoctorCheck(
            "OpenMP", Status.WARN, finding, "export CXX=g++ (and take OpenMP runtimes out of LD_PRELOAD)"
        )
    return DoctorCheck("OpenMP", Status.OK, named[0] if named else "none loaded")


def threads(inventory: Inventory) -> DoctorCheck:
    """PyTorch's threads against the cores that this process may use."""
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
    found = {path.read_text().strip() for path in CPUS.glob("cpu*/cpufreq/scaling_governor")}
    if not found:
        return DoctorCheck("CPU frequency", Status.OK, "no governor to be seen: the host or the firmware decides")
    finding = f"governor {', '.join(sorted(found))}"
    if "powersave" in found:
        return DoctorCheck("CPU frequency", Status.WARN, finding, "sudo cpupower frequency-set --governor performance")
    return DoctorCheck("CPU frequency", Status.OK, finding)


def huge_pages() -> DoctorCheck:
    choices = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    chosen = re.search(r"\[(\w+)\]", choices)
    return DoctorCheck("huge pages", Status.OK, f"transparent huge pages: {chosen[1] if chosen else choices.strip()}")


def _numbers(version: str) -> tuple[int, ...]:
    """(12, 4) of "12.4" or "libcupti.so.12.4"."""
    return tuple(int(each) for each in re.findall(r"\d+", version)[:2])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
