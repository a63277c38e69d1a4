"""Set-up avoids the CUDA libraries on a machine without an NVIDIA driver, if it can, and never waits long for that."""

import runpy
import socket
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
TOOL: dict[str, Any] = runpy.run_path(str(ROOT / "tools" / "torch_index.py"))
OWN = [":env:.index-url='https://mirror'", "global.extra-index-url='https://mirror'", "install.no-index='1'"]


class Index(BaseHTTPRequestHandler):
    """An index that lists PyTorch and nothing else."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/torch/" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Index)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_without_a_driver_the_index_of_cpu_wheels_is_taken_and_named() -> None:
    url, remark = TOOL["choice"]("linux", False, "", lambda index: True)
    assert url == TOOL["CPU_WHEELS"]
    assert url in remark


def test_where_it_does_not_answer_the_choice_is_pips_and_that_is_said() -> None:
    url, remark = TOOL["choice"]("linux", False, "", lambda index: False)
    assert url == ""
    assert "did not answer" in remark
    assert "6 GB" in remark
    assert "make TORCH_INDEX=URL" in remark


@pytest.mark.parametrize(
    ("platform", "driver", "config"),
    [("linux", True, ""), ("darwin", False, ""), *(("linux", False, own) for own in OWN)],
)
def test_with_a_driver_or_an_index_of_ones_own_nothing_is_asked(platform: str, driver: bool, config: str) -> None:
    def fail(index: str) -> bool:
        raise AssertionError(index)

    assert TOOL["choice"](platform, driver, config, fail)[0] == ""


def test_an_index_answers_if_it_lists_pytorch(index: str) -> None:
    assert TOOL["answers"](index)
    assert not TOOL["answers"](f"{index}/other")


def test_an_index_that_keeps_silent_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert not TOOL["answers"](f"http://127.0.0.1:{silent.getsockname()[1]}", 0.2)


def test_a_long_wait_for_an_index_is_announced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(TOOL["answers"].__globals__, "SILENT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert not TOOL["answers"](f"http://127.0.0.1:{silent.getsockname()[1]}", 1.2)
    assert "waiting for http://127.0.0.1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "asks"), [((), True), (("TORCH_INDEX=",), False), (("TORCH_INDEX=https://x",), False)]
)
def test_who_names_an_index_is_not_second_guessed(words: tuple[str, ...], asks: bool) -> None:
    command = ["make", "--dry-run", "--always-make", ".venv/.ready", *words]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert ("torch_index.py" in shown) == asks
    assert ("https://x" in shown) == ("TORCH_INDEX=https://x" in words)


PIP = """#!/bin/sh
echo Collecting everything
cat >&2 <<END
ERROR: Cannot install a and b because these package versions have conflicting dependencies.

The conflict is caused by:
    b 2 depends on c==3
    The user requested (constraint) c==4
END
exit 1
"""
PYTHON = """#!/bin/sh
[ "$1 $2" != "-m venv" ] || { mkdir -p .venv/bin && cp pip .venv/bin/pip; }
"""


def test_a_set_up_that_fails_shows_the_conflict_in_pips_own_words(tmp_path: Path) -> None:
    for name, text in (("pip", PIP), ("python", PYTHON), ("Makefile", (ROOT / "Makefile").read_text())):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    command = ["make", ".venv/.ready", "PYTHON=./python", "TORCH_INDEX="]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert process.returncode == 2
    assert "b 2 depends on c==3\n    The user requested (constraint) c==4\n" in process.stderr
    assert "Collecting" not in process.stderr
    assert "Collecting everything\n" in (tmp_path / ".venv/pip.log").read_text()
    assert not (tmp_path / ".venv/.ready").exists()
