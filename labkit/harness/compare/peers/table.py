"""The peers by name."""

from __future__ import annotations

from typing import cast

from labkit.harness.compare.loader import loader_at
from labkit.harness.compare.peers.peer import Peer
from labkit.harness.compare.sides import PEER_ROWS
from labkit.system.errors import UserError
from labkit.system.nearest import did_you_mean

PEERS = {row.peer: cast(Peer, loader_at(row.loader)) for row in PEER_ROWS}


def peer_named(name: str) -> Peer:
    """The peer of this name. UserError for an unknown name."""
    if name not in PEERS:
        raise UserError(f"unknown peer {name!r}{did_you_mean(name, PEERS)}; expected one of {', '.join(PEERS)}")
    return PEERS[name]
