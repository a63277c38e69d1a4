"""A fake peer without a runtime: a small package made for the test, which the real pip installs."""

import zipfile
from pathlib import Path
from typing import Any

from labkit.harness.compare.peers.folder import packages_in
from labkit.harness.compare.peers.peer import Peer
from labkit.harness.compare.peers.pip import Pip
from labkit.harness.compare.sides import SideRow

NAME = "pretended"
METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
WHEEL = "Wheel-Version: 1.0\nGenerator: here\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
ROWS = {
    NAME: SideRow(NAME, "a peer without a runtime", "", peer=NAME),
    f"{NAME}-int8": SideRow(f"{NAME}-int8", "the same with int8 weights", "", peer=NAME, own_type=True),
}  # to be put into the table of sides


class PretendedPeer(Peer):
    """Peer installed from the wheel `wheel`. `then` is called after pip."""

    name = NAME
    package = "pretended_package"
    requirements = ("pretended-package==1.2.3",)
    dtypes = ("float32",)

    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel
        self.installations = 0

    def then(self) -> None:
        """Does the rest of the installation."""

    def install(self, pip: Pip, folder: Path) -> None:
        self.installations += 1
        pip.install((str(self.wheel),), packages_in(folder))
        self.then()

    def convert(self, *arguments: Any, **options: Any) -> None:
        raise AssertionError("it is only installed")

    def load(self, *arguments: Any, **options: Any) -> Any:
        raise AssertionError("it is only installed")


def wheel(folder: Path, *, version: str = "1.2.3", code: str = "") -> Path:
    """Writes a wheel with one module, which pip can install; returns its path."""
    metadata = f"pretended_package-{version}.dist-info"
    path = folder / f"pretended_package-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("pretended_package.py", f"__version__ = {version!r}\n{code}\n")
        archive.writestr(f"{metadata}/METADATA", METADATA.format(name="pretended-package", version=version))
        archive.writestr(f"{metadata}/WHEEL", WHEEL)
        archive.writestr(f"{metadata}/RECORD", "")
    return path
