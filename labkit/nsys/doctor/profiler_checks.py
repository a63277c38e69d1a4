"""The doctor's checks of Nsight Systems: whether a capture on this machine would be complete."""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import sqlite3
import sys
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from labkit.nsys.agent import run_with_agent
from labkit.nsys.doctor.check import DoctorCheck, Status
from labkit.nsys.process import run
from labkit.nsys.tool import DOWNLOAD, Nsys, ask
from labkit.stages import DOMAIN, Phase, Stage, message
from labkit.system.owned_folder import owned_folder

LITTLE, TOO_LITTLE = 2 << 30, 200 << 20  # bytes free for the raw capture
PARANOIA = Path("/proc/sys/kernel/perf_event_paranoid")
MEMORY_DISKS = ("tmpfs", "ramfs")
PROBE_S = 120
PROBE_DOMAIN, PROBE_RANGE = "doctor", "plain"
PROBE = f"""
import nvtx
nvtx.push_range({PROBE_RANGE!r}, domain={PROBE_DOMAIN!r})
nvtx.pop_range(domain={PROBE_DOMAIN!r})
from labkit.stages import Phase, Stage, stage
with stage(Phase.PREFILL, Stage.EMBED):
    pass
"""
RANGES = """
select d.text || ':' || coalesce(r.text, s.value) from NVTX_EVENTS r
join NVTX_EVENTS d on d.eventType = 75 and d.domainId = r.domainId left join StringIds s on s.id = r.textId
where r.eventType = 59
"""


@dataclass(frozen=True)
class Probe:
    """A capture of a program that opens two ranges, one by plain nvtx and one by labkit.stages."""

    ranges: frozenset[str]  # "domain:message"
    failure: str | None = None  # why there is no report, with nsys's message


def capture_probe(nsys: Nsys) -> Probe:
    """Captures a program that opens two ranges. Raises FileNotFoundError if nsys has been removed."""
    with owned_folder("labkit-doctor-") as folder:
        report = folder / "probe.sqlite"
        traced = ("--trace=nvtx", "--sample=none", "--cpuctxsw=none", "--export=sqlite")
        output = f"--output={report.with_suffix('')}"
        command = [str(nsys.path), "profile", *traced, output, sys.executable, "-P", "-c", PROBE]
        # nsys's temporary files hold the environment. They go with the folder.
        environment = dict(os.environ) | {"TMPDIR": str(folder)}
        ended = run_with_agent(lambda: run(command, environment, timeout_s=PROBE_S))
        if ended.interrupted:
            raise KeyboardInterrupt
        if report.is_file():
            return Probe(_ranges(report))
    end = f"no end after {PROBE_S} s" if ended.late else f"exit code {ended.exit_code}"
    errors = [line for line in ended.said if re.search("error|fail|unable|denied|exception", line, re.IGNORECASE)]
    return Probe(frozenset(), ": ".join([end, *(errors or ended.said)[-1:]]))


def _ranges(report: Path) -> frozenset[str]:
    with closing(sqlite3.connect(f"{report.as_uri()}?mode=ro", uri=True)) as database:
        tables = {name for (name,) in database.execute("select name from sqlite_master")}
        if not {"NVTX_EVENTS", "StringIds"} <= tables:
            return frozenset()
        return frozenset(name for (name,) in database.execute(RANGES) if name)


def nsys_found(nsys: Nsys | None) -> DoctorCheck:
    if nsys is None:
        return DoctorCheck(
            "nsys",
            Status.WARN,
            "not found on the PATH or in the usual folders; torch.profiler stands in for it",
            "sudo apt-get install --no-install-recommends nsight-systems (Debian: enable its components contrib and "
            f"non-free first; Ubuntu: multiverse), or NVIDIA's own: {DOWNLOAD}",
        )
    return DoctorCheck("nsys", Status.OK, f"{nsys.version_text}, {nsys.path}")


def importer(nsys: Nsys) -> DoctorCheck:
    if fault := nsys.importer_fault():
        return DoctorCheck("importer", Status.FAIL, fault.reason, fault.repair)
    return DoctorCheck("importer", Status.OK, str(nsys.importer or "not where it usually is; see the test capture"))


def capture(probe: Probe) -> DoctorCheck:
    if probe.failure is None:
        return DoctorCheck("test capture", Status.OK, "gave a report and its SQLite export")
    repair = f"run it by hand to see more: nsys profile -t nvtx -s none --export sqlite -o probe {sys.executable} -V"
    return DoctorCheck("test capture", Status.FAIL, f"gave no report: {probe.failure}", repair)


def plain_ranges(probe: Probe) -> DoctorCheck:
    """Checks ranges of nvtx.annotate and nvtx.push_range, which users' own code opens."""
    return _ranges_check("NVTX ranges", "plain nvtx calls", f"{PROBE_DOMAIN}:{PROBE_RANGE}" in probe.ranges)


def stage_ranges(probe: Probe) -> DoctorCheck:
    """Checks ranges of labkit.stages, from which every figure is made."""
    arrived = f"{DOMAIN}:{message(Phase.PREFILL, Stage.EMBED)}" in probe.ranges
    return _ranges_check("stage ranges", "labkit's stages", arrived)


def _ranges_check(name: str, source: str, arrived: bool) -> DoctorCheck:
    installed = version("nvtx")
    if arrived:
        return DoctorCheck(name, Status.OK, f"ranges of {source} are captured (nvtx {installed})")
    if os.environ.get("NVTX_DISABLE"):
        return DoctorCheck(
            name, Status.FAIL, f"NVTX_DISABLE is set: no range of {source} is captured", "unset NVTX_DISABLE"
        )
    finding = f"with nvtx {installed} this nsys captures no range of {source}, without a warning"
    return DoctorCheck(name, Status.FAIL, finding, f"{sys.executable} -m pip install nvtx==0.2.11")


def sampling(nsys: Nsys | None) -> DoctorCheck:
    """Checks whether nsys may sample the CPU, by asking nsys: the system's setting does not apply to root."""
    level = int(PARANOIA.read_text())
    answer = ask(nsys.path, "status", "--environment") if nsys else ""
    verdict = re.search(r"\(process-tree\): (\w+)", str(answer))
    allowed = verdict[1] == "OK" if verdict else level <= 2 or os.geteuid() == 0
    setting = f"perf_event_paranoid is {level}"
    if allowed:
        return DoctorCheck("CPU sampling", Status.OK, setting)
    if level > 2:
        repair = "sudo sysctl kernel.perf_event_paranoid=2"
        return DoctorCheck("CPU sampling", Status.FAIL, f"{setting}, above 2: nsys may not sample", repair)
    reason = "; ".join(re.findall(r"^.*: Fail.*$", str(answer), re.MULTILINE))
    repair = "allow perf_event_open (a container: docker run --cap-add=PERFMON --security-opt seccomp=unconfined)"
    return DoctorCheck("CPU sampling", Status.FAIL, f"{setting}, but nsys may not sample: {reason}", repair)


def worker_start() -> DoctorCheck:
    """Checks how worker processes start by default, in a way that still lets a script choose."""
    chosen = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    if chosen == "spawn":
        return DoctorCheck("worker processes", Status.OK, "start by spawn: nsys sees their ranges")
    finding = f"start by {chosen} unless a script says otherwise: nsys sees none of their ranges"
    return DoctorCheck("worker processes", Status.WARN, finding, 'multiprocessing.set_start_method("spawn")')


def temporary_folder() -> DoctorCheck:
    """Checks TMPDIR, in which nsys keeps the raw capture until the program ends."""
    folder = Path(os.environ.get("TMPDIR") or "/tmp")
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        finding = f"TMPDIR={folder} is not a writable folder: nsys fails to start anything"
        return DoctorCheck("temporary folder", Status.FAIL, finding, f"export TMPDIR={_roomy(folder)}")
    free = shutil.disk_usage(folder).free
    kind = file_system(folder, Path("/proc/mounts").read_text())
    in_memory = kind in MEMORY_DISKS
    finding = f"{folder}: {free / 1e9:,.1f} GB free" + (f" on {kind}, taken from the run's memory" if in_memory else "")
    if free >= LITTLE and not in_memory:
        return DoctorCheck("temporary folder", Status.OK, finding)
    status = Status.FAIL if free < TOO_LITTLE else Status.WARN
    return DoctorCheck("temporary folder", status, finding, f"export TMPDIR={_roomy(folder)}")


def file_system(folder: Path, mounts: str) -> str:
    """The type of the file system that holds the folder, by the text of /proc/mounts."""
    rows = [line.split(" ") for line in mounts.splitlines()]
    holding = [row for row in rows if folder.resolve().is_relative_to(row[1].replace(r"\040", " "))]
    return max(holding, key=lambda row: len(row[1]), default=["", "", ""])[2]


def _roomy(instead_of: Path) -> Path:
    """A folder for temporary files on a disk with room, or a placeholder that describes it."""
    mounts = Path("/proc/mounts").read_text()
    for folder in (Path("/tmp"), Path("/var/tmp"), Path.home(), Path.cwd()):
        usable = folder != instead_of and folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
        if usable and shutil.disk_usage(folder).free >= LITTLE and file_system(folder, mounts) not in MEMORY_DISKS:
            return folder
    return Path("A_FOLDER_ON_A_DISK_WITH_2_GB_FREE")
