"""`labkit peers`: installed and missing peers, and an installation with its progress on stderr."""

import signal
from pathlib import Path

import pytest
import torch
from helpers.processes.command_line import Labkit, command_line
from helpers.processes.pretended_peers import NAME, ROWS, PretendedPeer, wheel
from rich.console import Console

from labkit.cli import peers as peers_cli
from labkit.harness.compare.peers import table
from labkit.harness.compare.sides import SIDES


@pytest.fixture
def labkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Labkit:
    """Runs a command line where one more peer is known and none is installed: (exit code, stdout, stderr)."""
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(peers_cli, "out", Console(width=200))
    for name, row in ROWS.items():
        monkeypatch.setitem(SIDES, name, row)
    monkeypatch.setitem(table.PEERS, NAME, PretendedPeer(wheel(tmp_path)))
    return command_line(monkeypatch, capsys)


@pytest.mark.parametrize("arguments", [("peers",), ("peers", "list")])
def test_every_peer_is_listed_with_its_sides_and_what_is_missing(arguments: tuple[str, ...], labkit: Labkit) -> None:
    code, out, _ = labkit(*arguments)
    assert code == 0
    for peer in table.PEERS.values():
        (line,) = (line for line in out.splitlines() if f"labkit peers install {peer.name}" in line)
        assert ", ".join(peer.sides) in line


def test_an_installation_says_what_it_does_where_it_is_and_what_it_gives(labkit: Labkit, tmp_path: Path) -> None:
    code, out, err = labkit("peers", "install", NAME)
    assert code == 0
    assert "downloading" in err
    assert "importing pretended_package" in err
    assert f"{NAME} 1.2.3 is installed: {tmp_path}/cache/peers/{NAME}" in out
    assert f"--baseline {NAME} or {NAME}-int8" in out

    code, out, _ = labkit("peers", "install", NAME)
    assert code == 0
    assert "is installed already; --again installs it anew" in out
    assert "1.2.3" in labkit("peers")[1]


def test_an_unknown_peer_is_refused(labkit: Labkit) -> None:
    code, _, err = labkit("peers", "install", "nobody")
    assert code == 2
    assert "unknown peer 'nobody'" in err


def test_an_interrupted_installation_ends_with_130(labkit: Labkit, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(peer: PretendedPeer) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(PretendedPeer, "then", interrupted)
    assert labkit("peers", "install", NAME)[0] == 130
