"""The rendezvous of machines: mistakes are reported before torch is loaded."""

import socket
import threading
import time

import pytest

from labkit.launcher.command import World
from labkit.launcher.rendezvous import Rendezvous, loopback


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@pytest.mark.parametrize(("text", "host"), [("node0:29500", "node0"), ("[fd00::1]:29500", "fd00::1")])
def test_it_is_a_host_and_a_port(text: str, host: str) -> None:
    meeting = Rendezvous.parse(text)
    assert meeting == Rendezvous(host, 29500)
    assert str(meeting) == text


@pytest.mark.parametrize("text", ["node0", ":29500", "node0:", "node0:x", "node0:0", "node0:65536", ""])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected HOST:PORT"):
        Rendezvous.parse(text)


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} .* is in use; take another one"):
            Rendezvous("127.0.0.1", port).check_here()
    Rendezvous("127.0.0.1", port).check_here()


def test_node_rank_0_has_to_be_the_machine_that_it_names() -> None:
    with pytest.raises(ValueError, match="expected an address of this machine"):
        Rendezvous("192.0.2.1", 29500).check_here()  # reserved for documentation: no machine has it


def test_a_host_without_an_address_is_named() -> None:
    with pytest.raises(ValueError, match=r"no-such-host\.invalid:29500, whose host has no address"):
        Rendezvous("no-such-host.invalid", 29500).check_here()


def test_a_name_that_leads_to_loopback_is_no_place_for_several_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian maps a machine's own name to 127.0.1.1. A user who writes 127.0.0.1 or localhost means loopback."""
    addresses = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 29500))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: addresses)
    with pytest.raises(ValueError, match=r"node0:29500: the name resolves to 127\.0\.1\.1 here.*; give an IP address"):
        World(2, nodes=2, rendezvous=Rendezvous("node0", 29500))
    World(2, rendezvous=Rendezvous("node0", 29500))
    for host in ("localhost", "127.0.1.1"):
        World(2, nodes=2, rendezvous=Rendezvous(host, 29500))


def test_one_that_is_not_reached_is_said_once_and_then_given_up() -> None:
    notes: list[str] = []
    with pytest.raises(TimeoutError, match=r"was not reached within 1 s .*refused.*start node rank 0"):
        Rendezvous("127.0.0.1", free_port()).wait_until_open(1, notes.append)
    assert len(notes) == 1


def test_one_that_opens_later_is_waited_for() -> None:
    port = free_port()

    def open_later() -> None:
        time.sleep(0.5)
        with socket.create_server(("127.0.0.1", port)) as listener:
            listener.accept()

    server = threading.Thread(target=open_later)
    server.start()
    Rendezvous("127.0.0.1", port).wait_until_open(30, lambda line: None)
    server.join(30)
    assert not server.is_alive()


def test_a_machine_reaches_itself_by_its_loopback() -> None:
    assert loopback() == "lo"
