"""Rendezvous of the machines of one run: an address of node rank 0, and a free port there."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address

import psutil

from labkit.system.errors import UserError

ATTEMPT_S, PAUSE_S = 3.0, 0.3  # time for one connection, and between two attempts


@dataclass(frozen=True)
class Rendezvous:
    """HOST:PORT, the same on every node."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Rendezvous:
        """Parses "node0:29500", "10.0.0.1:29500" or "[fd00::1]:29500". Raises ValueError for anything else."""
        host, _, port = text.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise UserError(f"got --rendezvous {text}, expected HOST:PORT, an address of node rank 0 and a free port")
        return cls(host.strip("[]"), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def check_reachable(self) -> None:
        """Raises ValueError for a name that resolves to the loopback address, as a Debian machine's own name does."""
        _, (address, _) = self._resolved()
        if self.host not in (address, "localhost") and ip_address(address).is_loopback:
            raise UserError(
                f"got --rendezvous {self}: the name resolves to {address} here, which other machines cannot reach; "
                "give an IP address"
            )

    def check_here(self) -> None:
        """Raises ValueError if node rank 0 can't listen: another machine's address, or a port in use."""
        try:
            for family, address in (self._resolved(), (socket.AF_INET, ("", self.port))):  # torch listens on all
                with socket.socket(family) as trial:
                    trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    trial.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UserError(
                    f"port {self.port} of --rendezvous {self} is in use; take another one, the same on every node"
                ) from None
            if error.errno == errno.EADDRNOTAVAIL:
                raise UserError(
                    f"got --rendezvous {self} on node rank 0, expected an address of this machine; give node rank 0 to "
                    "the machine that it names"
                ) from None
            raise

    def wait_until_open(self, timeout_s: float, say: Callable[[str], None]) -> None:
        """Waits until node rank 0 listens. Raises TimeoutError with the last error of the connection."""
        _, address = self._resolved()
        deadline = time.monotonic() + timeout_s
        announced = False
        while True:
            try:
                socket.create_connection(address, timeout=ATTEMPT_S).close()
                return
            except OSError as error:
                if time.monotonic() + PAUSE_S > deadline:
                    raise TimeoutError(
                        f"the rendezvous {self} was not reached within {timeout_s:g} s ({error}); start node rank 0 "
                        "there, with the same --rendezvous, and check that its firewall lets this port through"
                    ) from None
            if not announced:
                say(f"waiting for node rank 0 at {self}")
                announced = True
            time.sleep(PAUSE_S)

    def own_address(self) -> str | None:
        """The address from which this machine reaches the rendezvous; None if it is unknown."""
        family, address = self._resolved()
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(address)  # sends nothing
            except OSError:
                return None
            return str(probe.getsockname()[0])

    @property
    def is_here(self) -> bool:
        """Whether it is an address of this machine."""
        return self.own_address() == self._resolved()[1][0]

    def interface(self) -> str | None:
        """The network interface by which this machine reaches the rendezvous; None if it is unknown."""
        mine = self.own_address()
        names = (
            name
            for name, addresses in psutil.net_if_addrs().items()
            if any(address.address.partition("%")[0] == mine for address in addresses)
        )
        return next(names, None)

    def _resolved(self) -> tuple[int, tuple[str, int]]:
        try:
            family, _, _, _, address = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
        except socket.gaierror as error:
            raise UserError(
                f"got --rendezvous {self}, whose host has no address here ({error.strerror}); give an IP address"
            ) from None
        return family, (str(address[0]), self.port)


def loopback() -> str | None:
    """The loopback interface, by which a machine talks to itself without a network."""
    return Rendezvous("127.0.0.1", 1).interface() if os.name == "posix" else None
