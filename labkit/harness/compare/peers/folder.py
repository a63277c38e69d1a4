"""Folders of installed peers, and their records."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from labkit.system.cache_root import cache_root
from labkit.system.errors import UserError
from labkit.system.json_file import read_json
from labkit.system.whole_file import write_whole

RECORD = "peer.json"


@dataclass(frozen=True)
class PeerFolder:
    """The folder of an installed peer: `packages` to import, sometimes `sources`, and a record of their versions."""

    path: Path
    version: str
    python: str

    @property
    def packages(self) -> Path:
        return packages_in(self.path)

    @property
    def sources(self) -> Path:
        return sources_in(self.path)

    @property
    def fault(self) -> str | None:
        """Why this Python cannot use the installed packages; None when it can."""
        if self.python == python_version():
            return None
        return f"it was installed for Python {self.python}, this is {python_version()}"


def packages_in(folder: Path) -> Path:
    """The folder of a peer's packages in its folder, which may be moved."""
    return folder / "packages"


def sources_in(folder: Path) -> Path:
    """The folder with the sources of a peer that is compiled on this machine."""
    return folder / "sources"


def peers_root() -> Path | None:
    """The folder that holds the folders of installed peers; None for a user without a home."""
    root = cache_root()
    return None if root is None else root / "peers"


def installed(name: str) -> PeerFolder | None:
    """The folder of the peer called `name`; None where it is not installed."""
    root = peers_root()
    if root is None:
        return None
    try:
        record = read_json(root / name / RECORD, "the record of an installed peer")
        return PeerFolder(root / name, str(record["version"]), str(record["python"]))
    except (OSError, UserError, KeyError, TypeError):
        return None


def record(folder: Path, version: str, requirements: Sequence[str]) -> None:
    """Writes the record of an installation into `folder`."""
    known = {"version": version, "python": python_version(), "requirements": list(requirements)}
    write_whole(folder / RECORD, json.dumps(known, indent=2) + "\n")


def python_version() -> str:
    """Version of the running interpreter, as far as compiled packages depend on it: "3.12"."""
    return ".".join(platform.python_version_tuple()[:2])
