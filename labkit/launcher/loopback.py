"""Rendezvous of the ranks of one machine under torchrun: a store that listens only on the loopback address.

torchrun's own rendezvous listens on all interfaces, so that anyone who reaches the machine could connect to the store
of a run. Several machines need that, and plain `torchrun` always does it; `labkit launch` on one machine does not.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from labkit.launcher.command import LOOPBACK

ADDRESS = "127.0.0.1"
WAIT_S = 60


class LoopbackRendezvous(RendezvousHandler):
    """A rendezvous of one machine with itself: the agent holds the store, and the ranks are its clients."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._store: TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        if self._store is None:
            self._store = loopback_store()
        meeting = RendezvousStoreInfo(ADDRESS, self._store.port)
        return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, meeting)

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return LOOPBACK

    def get_run_id(self) -> str:
        return self._run_id

    def num_nodes_waiting(self) -> int:
        return 0

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Does nothing: there are no other machines to notify."""

    def shutdown(self) -> bool:
        return True


def loopback_store() -> TCPStore:
    """A store on a free port. torch would listen on all interfaces unless it gets a socket that already listens."""
    with socket.create_server((ADDRESS, 0), backlog=1024) as listener:
        port, descriptor = listener.getsockname()[1], listener.detach()  # the store closes it
    wait = timedelta(seconds=WAIT_S)
    return TCPStore(ADDRESS, port, None, True, wait, wait_for_workers=False, master_listen_fd=descriptor)


def register() -> None:
    """Registers the rendezvous with torchrun under its name."""
    rendezvous_handler_registry.register(LOOPBACK, lambda parameters: LoopbackRendezvous(parameters.run_id))
