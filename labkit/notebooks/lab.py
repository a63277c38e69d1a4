"""JupyterLab on copies of the notebooks."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from labkit.notebooks.start_page import NAME
from labkit.system.output_folder import runs_of


def lab_command(
    folder: Path, *, browser: bool = True, port: int | None = None, ip: str | None = None, more: Sequence[str] = ()
) -> list[str]:
    """The command that opens the start page in a folder of copies. The server's root is the folder that contains the
    copies' `runs`. One Ctrl-C ends the server with its kernels. more: further words for `jupyter lab`.
    """
    root = runs_of(folder.resolve()).parent
    inside = "".join(f"{part}/" for part in folder.resolve().relative_to(root).parts)
    options = {
        "ServerApp.root_dir": str(root),
        "LabApp.default_url": quote(f"/lab/tree/{inside}{NAME}"),
        "Application.log_level": "ERROR",
        "ServerApp.answer_yes": "True",
        "KernelManager.transport_encryption": "auto",
    }
    if not browser:
        options["ServerApp.open_browser"] = "False"
    if port is not None:
        options["ServerApp.port"] = str(port)
    if ip is not None:
        options["ServerApp.ip"] = ip
    if os.geteuid() == 0:
        options["ServerApp.allow_root"] = "True"
    words = (f"--{name}={value}" for name, value in options.items())
    return [sys.executable, "-P", "-m", "labkit.notebooks.lab_server", *words, *more]
