"""JupyterLab, or a page, in a headless Chromium, to test and measure what a reader sees."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labkit.system.errors import RunError
from labkit.system.lifetime import kill_session

CHROMIUMS = ("chromium", "chromium-browser", "google-chrome")
TOKEN = "labkit"
PATIENCE_S = 180  # limit for the server's start, for a cell, and for each wait on a page; a busy machine is slow
FLAGS = ("--no-sandbox", "--disable-background-networking", "--disable-component-update", "--no-first-run")
DARK, LIGHT = "JupyterLab Dark", "JupyterLab Light"
SETTINGS = {
    "apputils-extension/notification": {
        "fetchNews": "false",
        "checkForUpdates": False,
    },  # else it asks the user about both
    "notebook-extension/tracker": {"windowingMode": "none", "autoStartDefaultKernel": True},
}
IDLE = """() => {
  const context = window.jupyterapp?.shell.currentWidget?.sessionContext;
  const kernel = context?.session?.kernel;
  return Boolean(context?.isReady && kernel?.connectionStatus === "connected" && kernel.status === "idle");
}"""
RUN = """(command) => {
  window.labkitRan = false;
  window.jupyterapp.commands.execute(command).then(() => (window.labkitRan = true));
}"""
# JupyterLab's own error messages with a new settings folder and without a network.
NOISE = ("Failed to load resource: the server responded with a status of 404 (Not Found)",)


def missing() -> str | None:
    """The message about a missing installation for `jupyterlab`; None if nothing is missing."""
    if importlib.util.find_spec("playwright") is None:
        return "got no playwright; install it with: pip install playwright"
    if chromium() is None:
        return "got no Chromium; install it with: sudo apt install chromium"
    return None


def chromium() -> str | None:
    return next((path for name in CHROMIUMS if (path := shutil.which(name))), None)


@dataclass
class Lab:
    """A page with JupyterLab."""

    page: Any  # playwright's
    url: str
    errors: list[str] = field(default_factory=list)  # that the page has logged so far

    def open(self, notebook: str) -> None:
        """Opens a notebook of the server's folder and waits for its kernel."""
        self.page.goto(f"{self.url}/lab/tree/{notebook}?token={TOKEN}&reset")
        self.wait_idle()

    def run_all(self) -> None:
        """Runs every cell and waits for the last one."""
        self._run("notebook:run-all-cells")

    def run_next(self) -> None:
        """Runs the selected cell, at first the first one, and selects the next."""
        self._run("notebook:run-cell-and-select-next")

    def _run(self, command: str) -> None:
        self.page.evaluate(RUN, command)
        self.page.wait_for_function("() => window.labkitRan")
        self.wait_idle()

    def wait_idle(self) -> None:
        self.page.wait_for_function(IDLE)


@contextlib.contextmanager
def jupyterlab(
    folder: Path,
    *,
    home: Path | None = None,
    width: int = 1280,
    height: int = 1000,
    scale: float = 1,
    theme: str = LIGHT,
) -> Iterator[Lab]:
    """A server on `folder`, with its own settings, and a page. Both end with this context.

    home: folder for the server's settings and its list of trusted notebooks; None: a temporary folder.

    Raises RuntimeError if something is not installed or the server does not start.
    """
    if reason := missing():
        raise RunError(reason)
    with (
        tempfile.TemporaryDirectory(prefix="labkit-lab-") as temporary,
        _server(folder, home or Path(temporary), theme) as url,
        opened_page(width=width, height=height, scale=scale) as (page, errors),
    ):
        yield Lab(page, url, errors)


@contextlib.contextmanager
def opened_page(*, width: int = 1280, height: int = 1000, scale: float = 1) -> Iterator[tuple[Any, list[str]]]:
    """An empty page of playwright's, and the errors that it has logged. RuntimeError: something is not installed."""
    if reason := missing():
        raise RunError(reason)
    errors: list[str] = []

    def note(text: str) -> None:
        if not text.startswith(NOISE):
            errors.append(text)

    playwright = importlib.import_module("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium(), args=list(FLAGS))
        page = browser.new_page(viewport={"width": width, "height": height}, device_scale_factor=scale)
        page.set_default_timeout(PATIENCE_S * 1000)
        page.on("console", lambda message: note(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: note(str(error)))
        try:
            yield page, errors
        finally:
            browser.close()


@contextlib.contextmanager
def _server(folder: Path, home: Path, theme: str) -> Iterator[str]:
    settings = SETTINGS | {"apputils-extension/themes": {"theme": theme}}
    for name, values in settings.items():
        file = (home / "settings" / "@jupyterlab" / name).with_suffix(".jupyterlab-settings")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    places = {"CONFIG_DIR": "config", "DATA_DIR": "data", "RUNTIME_DIR": "runtime"}
    variables = {f"JUPYTER_{name}": str(home / place) for name, place in places.items()}
    variables |= {
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
    }
    options = {
        "ServerApp.root_dir": folder, "ServerApp.port": 0, "ServerApp.open_browser": False,
        "ServerApp.allow_root": True, "ServerApp.terminals_enabled": False, "IdentityProvider.token": TOKEN,
        "LabApp.expose_app_in_browser": True,
    }  # fmt: skip
    command = [sys.executable, "-P", "-m", "jupyterlab", *(f"--{name}={value}" for name, value in options.items())]
    log = home / "log"
    with log.open("wb") as sink:
        server = subprocess.Popen(
            command, env=os.environ | variables | {"IPYTHONDIR": str(home / "ipython")}, stdin=subprocess.DEVNULL,
            stdout=sink, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        yield _address(server, home / "runtime", log)
    finally:
        server.terminate()  # it ends its kernels
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(15)
        kill_session(server)


def _address(server: subprocess.Popen[bytes], runtime: Path, log: Path) -> str:
    """The address of the server, once it listens there. Its file appears a moment earlier."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until and server.poll() is None:
        for file in runtime.glob(f"jpserver-{server.pid}.json"):
            with contextlib.suppress(json.JSONDecodeError, ConnectionRefusedError):  # the file may be incomplete
                info = json.loads(file.read_text())
                socket.create_connection((info["hostname"], info["port"])).close()
                return str(info["url"]).rstrip("/")
        time.sleep(0.05)
    last = "\n".join(log.read_text(errors="replace").splitlines()[-8:])
    raise RunError(f"got no JupyterLab within {PATIENCE_S} s; its last lines:\n{last}")
