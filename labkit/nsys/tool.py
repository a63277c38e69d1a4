"""The installed Nsight Systems: its place, its version, and whether it can make reports, found by running it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from glob import glob
from pathlib import Path

from labkit.system.errors import UserError
from labkit.system.home import expanded

LOCATION = "LABKIT_NSYS"  # names the nsys to use: the program or its folder
USUAL_PLACES = (
    "/opt/nvidia/nsight-systems*/*/bin/nsys",
    "/opt/nvidia/nsight-systems*/*/target-linux-*/nsys",
    "/opt/nvidia/hpc_sdk/*/*/profilers/Nsight_Systems*/bin/nsys",
    "/usr/local/cuda*/nsight-systems-*/target-linux-*/nsys",
    "/usr/local/cuda*/bin/nsys",
    "/usr/lib/nsight-systems/bin/nsys",
    "~/nsight-systems*/bin/nsys",
    "~/nsight-systems*/target-linux-*/nsys",
    "~/nsight-systems*/*/target-linux-*/nsys",
)
IMPORTER = "QdstrmImporter"
ANSWER_S = 30  # for a question like --version, also on a machine that is busy
DOWNLOAD = "https://developer.nvidia.com/nsight-systems/get-started"


@dataclass(frozen=True)
class Fault:
    """A problem, and the one line that repairs it."""

    reason: str
    repair: str

    def __str__(self) -> str:
        return f"{self.reason}. Repair: {self.repair}"


@dataclass(frozen=True)
class Nsys:
    """One installation."""

    path: Path  # on the PATH or in a folder, perhaps a link
    version: tuple[int, ...]  # (2023, 4, 4, 54)
    version_text: str  # "2023.4.4.54-234433681190v0"
    importer: Path | None  # the program that turns a capture into a report

    @property
    def folder(self) -> Path:
        """The program's folder, with links resolved: `target-linux-x64` of the installation, or that of a script."""
        return self.path.resolve().parent

    def importer_fault(self) -> Fault | None:
        """Why captures cannot be turned into reports; None if they can, or if the folders are not the usual ones."""
        if not self.folder.name.startswith("target-"):
            return None
        if self.importer is None:
            reason = f"nsys {self.version_text} captures but makes no reports: {self.folder.parent} has no host folder"
            return Fault(f"{reason} with {IMPORTER}", self._link_host_folder())
        answer = ask(self.importer, "--version")
        if isinstance(answer, str):
            if self._same_version(answer):
                return None
            reason = f"nsys is {self.version_text}, but its importer {self.importer} is another version"
        else:
            reason = f"nsys makes no reports: {self.importer} does not run: {answer}"
        return Fault(reason, self._reinstall())

    def _same_version(self, answer: str) -> bool:
        return ".".join(map(str, self.version)) in answer

    def _link_host_folder(self) -> str:
        for importer in self._other_importers():
            answer = ask(importer, "--version")
            if isinstance(answer, str) and self._same_version(answer):
                link = self.folder.parent / importer.parent.name
                if link.is_symlink() or not link.exists():
                    return _sudo(link.parent) + shlex.join(["ln", "-sfn", str(importer.parent), str(link)])
        return self._reinstall()

    def _other_importers(self) -> Iterator[Path]:
        """Importers near the links that lead to the program, and near the folders above it."""
        near, hop = [], self.path
        for _ in range(10):
            near += [hop.parent.parent]
            if not hop.is_symlink():
                break
            hop = Path(os.path.normpath(hop.parent / hop.readlink()))
        near += [folder / "nsight-systems" for folder in self.folder.parents[1:4]]
        near += [Path("/usr/lib/nsight-systems")]
        for folder in dict.fromkeys(near):
            yield from sorted(folder.glob(f"host-*/{IMPORTER}"))

    def _reinstall(self) -> str:
        if self.folder.is_relative_to("/usr/lib"):
            return f"{_sudo(self.folder)}apt-get install --reinstall nsight-systems nsight-systems-target"
        return f"install Nsight Systems again, with its host folder: {DOWNLOAD}"


def find_nsys() -> Nsys | None:
    """The nsys that LABKIT_NSYS names, else the nsys on the PATH, else the newest in the usual folders that runs.

    None without any. Raises ValueError where LABKIT_NSYS does not name an nsys.
    """
    if named := os.environ.get(LOCATION):
        return _named(expanded(named))
    if (on_path := shutil.which("nsys")) and isinstance(nsys := _identify(Path(on_path)), Nsys):
        return nsys
    paths = {Path(path) for pattern in USUAL_PLACES for path in sorted(glob(os.path.expanduser(pattern)))}
    usual = [nsys for nsys in map(_identify, sorted(paths)) if isinstance(nsys, Nsys)]
    return max(usual, key=lambda nsys: nsys.version, default=None)


def _named(path: Path) -> Nsys:
    patterns = ("nsys", "bin/nsys", "target-linux-*/nsys")
    programs = [program for pattern in patterns for program in sorted(path.glob(pattern))] if path.is_dir() else [path]
    nsys = _identify(programs[0]) if programs else "there is no nsys in this folder"
    if isinstance(nsys, Nsys):
        return nsys
    raise UserError(
        f"got {LOCATION}={path}, expected the nsys program or its folder ({nsys}); correct it, or unset {LOCATION} "
        "to search the PATH and the usual folders"
    )


def _identify(path: Path) -> Nsys | str:
    """The installation of this program, or the reason why the program is not nsys."""
    answer = ask(path, "--version")
    if not isinstance(answer, str):
        return f"it does not run: {answer}"
    if not (version := re.search(r"Nsight Systems version (\d[\w.-]*)", answer)):
        return f"asked for its version, it says {answer.strip()[:80]!r}"
    numbers = tuple(int(digits) for digits in re.findall(r"\d+", version[1].partition("-")[0]))
    importers = sorted(path.resolve().parent.parent.glob(f"host-*/{IMPORTER}"))
    return Nsys(path, numbers, version[1], importers[0] if importers else None)


def ask(program: Path, *arguments: str) -> str | Exception:
    """The output of the program; the error if it can't be run or fails."""
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return error
    if done.returncode:
        return RuntimeError((done.stderr or done.stdout).strip().partition("\n")[0] or f"exit code {done.returncode}")
    return done.stdout


def _sudo(folder: Path) -> str:
    return "" if os.access(folder, os.W_OK) else "sudo "
