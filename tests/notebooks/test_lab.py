"""`labkit lab` opens copies of the notebooks, and one Ctrl-C ends it."""

import json
import os
import pty
import re
import signal
import subprocess
import time
import urllib.request
from pathlib import Path

import nbformat
import psutil
import pytest
from helpers.processes.command_line import command_line
from helpers.sweeps import swept
from jupyter_client import BlockingKernelClient

from labkit.notebooks.carried import carried_notebooks
from labkit.notebooks.lab import NEEDS, lab_command


def test_the_command_copies_the_notebooks_and_hands_on_what_follows_the_dashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[list[str]] = []

    def start(program: str, arguments: list[str]) -> None:
        started.append(arguments)
        raise SystemExit(0)  # the server would replace this process

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "execv", start)
    code, output, _ = command_line(monkeypatch, capsys)("lab", "--port", "8890", "--", "--collaborative")
    assert code == 0
    assert output.startswith("lab: ")
    assert {path.stem for path in (tmp_path / "runs" / "notebooks").glob("*.ipynb")} - {"00_start"} == {
        path.stem for path in carried_notebooks().values() if path.parent.name == "notebooks"
    }
    assert {"--ServerApp.port=8890", "--collaborative", f"--ServerApp.root_dir={tmp_path}"} <= set(started[0])
    assert "--LabApp.default_url=/lab/tree/runs/notebooks/00_start.ipynb" in started[0]
    (page,) = nbformat.read(tmp_path / "runs" / "notebooks" / "00_start.ipynb", as_version=4).cells
    links = re.findall(r"\]\(([^)]+)\)", page.source)
    assert links == [f"{name}.ipynb" for name in carried_notebooks()]
    assert all((tmp_path / "runs" / "notebooks" / link).is_file() for link in links)


def test_the_server_sees_the_folder_that_the_results_go_to(tmp_path: Path) -> None:
    """The root is the parent of `runs` for copies in `runs`; copies elsewhere contain their own `runs`."""
    assert f"--ServerApp.root_dir={tmp_path}" in lab_command(tmp_path / "runs" / "my notebooks")
    assert "--LabApp.default_url=/lab/tree/runs/my%20notebooks/00_start.ipynb" in lab_command(
        tmp_path / "runs" / "my notebooks"
    )
    assert f"--ServerApp.root_dir={tmp_path / 'mine'}" in lab_command(tmp_path / "mine")


def test_each_notebook_says_its_minutes_and_needs_on_the_start_page() -> None:
    assert set(NEEDS) == {name for name in carried_notebooks() if "/" not in name}


@pytest.mark.parametrize("terminal", swept({"in a terminal": True, "without one": False}, ["in a terminal"]))
def test_one_interrupt_ends_the_server_with_its_kernels(terminal: bool, tmp_path: Path) -> None:
    """Jupyter itself handles an interrupt only in a terminal."""
    runtime = tmp_path / "RUNTIME"
    directories = {f"JUPYTER_{name}_DIR": str(tmp_path / name) for name in ("CONFIG", "DATA", "RUNTIME")}
    command = lab_command(tmp_path, browser=False, port=0)
    controller, terminal_end = pty.openpty()
    with (tmp_path / "log").open("wb") as log:
        stdin = terminal_end if terminal else subprocess.DEVNULL
        server = subprocess.Popen(
            command, env=os.environ | directories, stdin=stdin, stdout=log, stderr=log, start_new_session=True
        )
    try:
        while not (addresses := re.findall(r"lab: (http://\S+)\n", (tmp_path / "log").read_text())):
            assert server.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.05)
        (address,) = addresses
        kernel = start_kernel(address, runtime)
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0, (tmp_path / "log").read_text()
        log_text = (tmp_path / "log").read_text()
        first_line, *rest = log_text.splitlines()
        assert re.fullmatch(r"lab: http://\S+:\d+/lab\S*\?\S*token=\w+", first_line), log_text
        expected = ("Shutting down", "stopping", "KeyboardInterrupt caught in kernel")  # the last: of a busy kernel
        assert all(any(text in line for text in expected) for line in rest if line), log_text
        assert not [*runtime.glob("jpserver-*"), *runtime.glob("kernel-*")]
        assert not [
            process.pid for process in psutil.process_iter(["cmdline"]) if kernel in str(process.info["cmdline"])
        ]
    finally:
        server.kill()
        server.wait()
        os.close(controller)
        os.close(terminal_end)


def start_kernel(address: str, runtime: Path) -> str:
    """Starts a kernel of a server, waits until it answers, and returns its id."""
    site, token = re.fullmatch(r"(http://[^/]+)/.*token=(\w+)", address).groups()  # type: ignore[union-attr]
    request = urllib.request.Request(f"{site}/api/kernels", b"{}", {"Authorization": f"token {token}"})
    with urllib.request.urlopen(request) as answer:
        kernel = str(json.load(answer)["id"])
    client = BlockingKernelClient(connection_file=str(runtime / f"kernel-{kernel}.json"))
    client.load_connection_file()
    client.start_channels(hb=False)  # a busy machine misses heartbeats
    client.kernel_info()
    client.get_shell_msg(timeout=60)
    client.stop_channels()
    return kernel
