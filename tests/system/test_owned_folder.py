"""Temporary folders are removed at the end, or after their owner has died, but not while it lives."""

import subprocess
import sys
from pathlib import Path

import pytest

from labkit.system.owned_folder import owned_folder

OWNER = """
import sys
from pathlib import Path
from labkit.system.owned_folder import owned_folder
with owned_folder("labkit-x-", Path(sys.argv[1])) as folder:
    (folder / "file").touch()
    print(folder, flush=True)
    sys.stdin.read()
"""


def interrupted(parent: Path) -> None:
    with owned_folder("labkit-x-", parent) as folder:
        (folder / "file").touch()
        assert folder.name.startswith("labkit-x-")
        raise KeyboardInterrupt


def test_it_is_gone_at_the_end_whatever_happens(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupted(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_only_what_a_dead_process_left_is_swept(tmp_path: Path) -> None:
    (tmp_path / "labkit-y-1").mkdir()
    (tmp_path / "labkit-x-file").touch()
    swept: list[Path] = []
    owner = [sys.executable, "-P", "-c", OWNER, str(tmp_path)]
    with subprocess.Popen(owner, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        with owned_folder("labkit-x-", tmp_path, before_removal=swept.append):
            assert (folder / "file").exists()
            process.kill()
            process.wait()
    assert swept == []
    assert (folder / "file").exists()
    with owned_folder("labkit-x-", tmp_path, before_removal=swept.append) as own:
        assert swept == [folder]
        assert {path.name for path in tmp_path.iterdir()} == {"labkit-y-1", "labkit-x-file", own.name}
