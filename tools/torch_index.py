"""Prints the index from which `make` takes PyTorch, and says why on stderr. Prints nothing if pip is to choose.

For Linux pip finds PyTorch with gigabytes of CUDA libraries, which a machine without an NVIDIA driver has no use for.
This runs before anything is installed, so it needs nothing but Python and pip.
"""

import http.client
import re
import shutil
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
PATIENCE_S = 30.0
SILENT_S = 3.0  # after which the wait is announced
LARGE = "with CUDA libraries set-up downloads about 3 GB and takes 6 GB on the disk"
SMALL = "for the small build, 0.8 GB and 3 GB, name an index of CPU wheels: make TORCH_INDEX=URL"


def choice(platform: str, driver: bool, pip_config: str, answers: Callable[[str], bool]) -> tuple[str, str]:
    """The index, or an empty text for pip's own choice, and a remark. pip_config: as `pip config list` prints it."""
    if platform != "linux" or driver:
        return "", ""
    if re.search(r"\.(extra-index-url|index-url|no-index)=", pip_config):
        return "", f"no NVIDIA driver; PyTorch comes from where pip is configured to look: {LARGE}; {SMALL}"
    if not answers(CPU_WHEELS):
        return "", f"no NVIDIA driver, but {CPU_WHEELS} did not answer. PyTorch comes as pip finds it: {LARGE}; {SMALL}"
    return (
        CPU_WHEELS,
        f"no NVIDIA driver: PyTorch's CPU wheels, from {CPU_WHEELS}; make TORCH_INDEX= takes pip's choice",
    )


def answers(index: str, patience_s: float = PATIENCE_S) -> bool:
    """Whether an index lists PyTorch in time. A refusal ends the wait.

    A thread asks, because no time-out ends the look-up of a name.
    """
    statuses: list[int] = []

    def ask() -> None:
        with (
            suppress(OSError, http.client.HTTPException),
            urllib.request.urlopen(f"{index}/torch/", timeout=patience_s) as answer,
        ):
            statuses.append(answer.status)

    request = threading.Thread(target=ask, daemon=True)
    request.start()
    request.join(min(SILENT_S, patience_s))
    if request.is_alive() and patience_s > SILENT_S:
        sys.stderr.write(f"set-up: waiting for {index}, for {patience_s:.0f} s at most\n")
        request.join(patience_s - SILENT_S)
    return statuses == [200]


def has_driver() -> bool:
    """Whether this machine has an NVIDIA driver. Under WSL there is only the program, and no file in /proc."""
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def pip_config() -> str:
    """pip's configuration, from its files and environment variables, as `pip config list` prints it."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


if __name__ == "__main__":
    index, remark = choice(sys.platform, has_driver(), pip_config(), answers)
    if remark:
        sys.stderr.write(f"set-up: {remark}\n")
    sys.stdout.write(index)
