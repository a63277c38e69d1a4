"""Installs a peer into a folder of its own, whole or not at all."""

from __future__ import annotations

import sys
import uuid
from pathlib import Path

from labkit.harness.compare.peers.folder import PeerFolder, installed, packages_in, peers_root, record
from labkit.harness.compare.peers.peer import Peer
from labkit.harness.compare.peers.pip import Pip
from labkit.system.child import run_child
from labkit.system.errors import UserError
from labkit.system.marked_run import ended_with_owner
from labkit.system.output_folder import check_output_folder
from labkit.system.owned_folder import owned_folder
from labkit.system.progress import Progress, unheard

ROOM_BYTES = 1 << 30
TRY = "import sys; sys.path.append(sys.argv[1]); import {package}; print({package}.__version__)"


def install(peer: Peer, *, again: bool = False, progress: Progress | None = None) -> PeerFolder:
    """Installs `peer`, unless it is installed already, and returns its folder. `again`: install it in any case.

    The peer is installed in a temporary folder, and renamed when it is whole and its package could be imported. The
    temporary folder and the processes of the installation always end. UserError: no writable folder, no space, no pip
    or no compiler. RunError: pip failed; the message names the log.
    """
    follow = progress or unheard
    present = installed(peer.name)
    if present is not None and not present.fault and not again:
        return present
    root = peers_root()
    if root is None:
        raise UserError("got no home folder, expected one to install into; name a folder with LABKIT_CACHE")
    check_output_folder(root, room_bytes=ROOM_BYTES, what=peer.name, option="LABKIT_CACHE")
    mark = uuid.uuid4().hex
    with (
        owned_folder(f".new-{peer.name}-", root) as temporary,
        ended_with_owner(mark, (temporary,)),
        (root / f"{peer.name}.log").open("w") as log,
    ):
        folder, scratch = temporary / "peer", temporary / "scratch"
        folder.mkdir()
        scratch.mkdir()
        peer.install(Pip(log, scratch, mark, follow), folder)
        follow(0, 1, f"importing {peer.package}")
        version = _version(peer, folder)
        record(folder, version, peer.requirements)
        final = root / peer.name
        if final.exists():
            final.rename(temporary / "before")
        folder.rename(final)
    folder_of_peer = installed(peer.name)
    assert folder_of_peer is not None
    return folder_of_peer


def _version(peer: Peer, folder: Path) -> str:
    """Version of the imported package, without the build that some packages append."""
    command = [sys.executable, "-P", "-c", TRY.format(package=peer.package), str(packages_in(folder))]
    return run_child(command, f"{peer.name} is installed but cannot be imported").splitlines()[-1].partition("-")[0]
