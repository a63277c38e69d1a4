"""Install a peer into a folder of its own, whole or not at all."""

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
    """The folder of `peer`, which is installed from now on. `again`: install it anew where it is installed already.

    It gets its name when it is whole and its package has been imported. Until then it lies in a temporary folder beside
    it, which goes away whatever happens, and so does what still runs. UserError: there is no folder to write to, no
    room, no pip or no compiler. RunError: pip failed; the message names the log.
    """
    follow = progress or unheard
    there = installed(peer.name)
    if there is not None and not there.fault and not again:
        return there
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
    found = installed(peer.name)
    assert found is not None
    return found


def _version(peer: Peer, folder: Path) -> str:
    """What the package says that it is, when it is imported; without what some add about their build."""
    command = [sys.executable, "-P", "-c", TRY.format(package=peer.package), str(packages_in(folder))]
    return run_child(command, f"{peer.name} is installed but cannot be imported").splitlines()[-1].partition("-")[0]
