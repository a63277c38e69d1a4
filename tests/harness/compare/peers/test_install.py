"""A peer is installed completely or not at all. The real pip installs a package that the tests make."""

import json
import re
import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from helpers.processes.pretended_peers import NAME, ROWS, PretendedPeer, wheel
from helpers.sweeps import swept
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from labkit.harness.compare.peers import folder as folders
from labkit.harness.compare.peers.folder import RECORD, installed, peers_root, python_version
from labkit.harness.compare.peers.install import install
from labkit.harness.compare.peers.pip import Pip, cause
from labkit.harness.compare.peers.table import PEERS, peer_named
from labkit.harness.compare.sides import PEER_ROWS, SIDES
from labkit.system import output_folder
from labkit.system.errors import RunError, UserError
from labkit.system.progress import unheard


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of installed peers; there is no network and no GPU."""
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return tmp_path / "cache" / "peers"


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PretendedPeer:
    for name, row in ROWS.items():
        monkeypatch.setitem(SIDES, name, row)
    return PretendedPeer(wheel(tmp_path))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_an_installed_peer_is_found_and_can_be_imported(peer: PretendedPeer, root: Path) -> None:
    reason = peer.unavailable()
    assert reason is not None
    assert f"labkit peers install {NAME}" in reason
    steps: list[str] = []
    installation = install(peer, progress=lambda done, total, label: steps.append(label))
    assert installation == installed(NAME)
    assert (installation.path, installation.version, installation.python) == (root / NAME, "1.2.3", python_version())
    assert peer.unavailable() is None
    assert steps == [f"downloading {peer.wheel}", "importing pretended_package"]
    assert names(root) == {NAME, f"{NAME}.log"}
    assert names(root / NAME) == {"packages", RECORD}
    try:
        assert peer.import_package().__version__ == "1.2.3"
    finally:
        sys.path.remove(str(installation.packages))
        del sys.modules["pretended_package"]


def test_installing_again_does_nothing_unless_it_is_asked_for(peer: PretendedPeer, tmp_path: Path) -> None:
    install(peer)
    install(peer)
    assert peer.installations == 1
    peer.wheel = wheel(tmp_path, version="1.2.4")
    assert install(peer, again=True).version == "1.2.4"
    assert peer.installations == 2


def test_a_peer_for_another_python_is_unusable_and_replaced(peer: PretendedPeer) -> None:
    record = install(peer).path / RECORD
    record.write_text(json.dumps(json.loads(record.read_text()) | {"python": "2.7"}))
    reason = peer.unavailable()
    assert reason is not None
    assert "was installed for Python 2.7" in reason
    assert "--again" in reason
    install(peer)
    assert peer.unavailable() is None


@pytest.mark.parametrize(
    "text", swept({"empty": "", "damaged": "{", "list": "[]", "short": '{"version": "1"}'}, ["damaged"])
)
def test_a_folder_with_no_record_of_what_it_holds_is_not_installed(peer: PretendedPeer, text: str) -> None:
    installation = install(peer)
    (installation.path / RECORD).write_text(text)
    assert installed(NAME) is None
    assert install(peer) == installation


@pytest.mark.parametrize("error", swept({"interrupt": KeyboardInterrupt(), "failure": RuntimeError("out of luck")}, []))
def test_an_installation_that_is_cut_off_leaves_what_was_there(
    peer: PretendedPeer, root: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(peer, "then", fail)
    with pytest.raises(type(error)):
        install(peer)
    assert names(root) == {f"{NAME}.log"}
    monkeypatch.undo()
    monkeypatch.setenv("LABKIT_CACHE", str(root.parent))
    before = install(peer)
    monkeypatch.setattr(peer, "then", fail)
    with pytest.raises(type(error)):
        install(peer, again=True)
    assert installed(NAME) == before


def test_a_package_that_cannot_be_imported_is_not_installed(peer: PretendedPeer, root: Path, tmp_path: Path) -> None:
    peer.wheel = wheel(tmp_path, code="import no_such_package")
    with pytest.raises(RunError, match=r"cannot be imported\n(.*\n)*.*No module named 'no_such_package'"):
        install(peer)
    assert names(root) == {f"{NAME}.log"}


def test_a_package_that_no_index_has_is_one_line_with_the_log(peer: PretendedPeer, root: Path) -> None:
    peer.wheel = Path("no-such-package==1.0")
    with pytest.raises(RunError) as error_info:
        install(peer)
    assert "no package index has it" in str(error_info.value)
    assert "\n" not in str(error_info.value)
    log = root / f"{NAME}.log"
    assert str(log) in str(error_info.value)
    assert "no-such-package" in log.read_text()


def test_a_disk_without_room_is_refused_before_anything_starts(
    peer: PretendedPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(output_folder.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match=r"pretended cannot be written .* expected 1074 MB .* \(LABKIT_CACHE\)"):
        install(peer)
    assert peer.installations == 0


def test_a_user_without_a_home_is_told_what_to_set(peer: PretendedPeer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "cache_root", lambda: None)
    assert peers_root() is None
    with pytest.raises(UserError, match="LABKIT_CACHE"):
        install(peer)


@pytest.mark.parametrize(
    ("lines", "meaning"),
    [
        (["ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"], "disk is full"),
        (["WARNING: Retrying ... NewConnectionError('...')", "ERROR: No matching distribution"], "is there a network"),
        (["ERROR: No matching distribution found for x==1"], "no package index has it"),
        (["CMake Error: CMAKE_CXX_COMPILER not set, after EnableLanguage"], "apt-get install g++"),
        (["a.cpp:1: error: expected ';'", "2 warnings", "note: this is an issue with the package"], "expected ';'"),
        ([], "it said nothing"),
    ],
    ids=["disk", "network", "index", "compiler", "code", "silent"],
)
def test_what_pip_says_is_put_into_words(lines: list[str], meaning: str) -> None:
    assert meaning in cause(lines)


def test_a_build_is_counted_and_ends_with_the_one_who_follows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\necho '  [3/7] Building'\nsleep 600\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))

    def follow(done: float, total: float, label: str) -> None:
        if (done, total) == (3, 7):
            raise KeyboardInterrupt

    with (tmp_path / "log").open("w") as log, pytest.raises(KeyboardInterrupt):
        Pip(log, tmp_path, "mark", follow).build(tmp_path, tmp_path, {})
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_an_environment_without_pip_is_told_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with (tmp_path / "log").open("w") as log, pytest.raises(UserError, match="-m ensurepip"):
        Pip(log, tmp_path, "mark", unheard)


def test_looking_for_pip_is_no_import_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When pip is imported, setuptools' finder stops replacing distutils, and setuptools itself no longer imports."""
    searched: list[str] = []
    finder = SimpleNamespace(find_spec=lambda name, path=None, target=None: searched.append(name))
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    with (tmp_path / "log").open("w") as log:
        Pip(log, tmp_path, "mark", unheard)
    assert "pip" not in searched


def test_an_unknown_peer_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"unknown peer 'nobody'; expected one of llama.cpp"):
        peer_named("nobody")


def test_a_dtype_that_a_side_does_not_compute_in_is_refused(peer: PretendedPeer) -> None:
    install(peer)
    peer.check(f"{NAME}-int8", dtype="bfloat16", batch=3)
    with pytest.raises(UserError, match="got bfloat16 for pretended, expected float32"):
        peer.check(NAME, dtype="bfloat16", batch=1)


def test_each_side_belongs_to_one_peer() -> None:
    assert len(PEER_ROWS) == sum(len(known_peer.sides) for known_peer in PEERS.values())
    assert all(known_peer.name == name for name, known_peer in PEERS.items())


@pytest.mark.parametrize("name", PEERS)
def test_requirements_are_exact_and_leave_out_what_labkit_has(name: str) -> None:
    for line in PEERS[name].requirements:
        assert re.fullmatch(r"[a-z0-9._-]+==\d+(\.\w+)*", line)
    needed = {canonicalize_name(Requirement(line).name) for line in PEERS[name].requirements}
    assert not needed & {canonicalize_name(str(package)) for package in ("torch", "numpy", "transformers")}
    assert version("torch")
