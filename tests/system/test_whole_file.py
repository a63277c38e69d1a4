"""Files that are written whole or not at all, and what killed writers leave behind."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from labkit.system.whole_file import remove_unfinished, whole_file

WRITER = """
import sys
from pathlib import Path
from labkit.system.whole_file import whole_file
with whole_file(Path(sys.argv[1])) as path:
    path.write_text("half")
    print("writing", flush=True)
    sys.stdin.read()
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def interrupted(target: Path) -> None:
    with whole_file(target) as path:
        path.write_text("ha")
        raise KeyboardInterrupt


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    with whole_file(tmp_path / "a.txt") as path:
        path.write_text("whole")
        assert not (tmp_path / "a.txt").exists()
    assert names(tmp_path) == ["a.txt"]
    with pytest.raises(KeyboardInterrupt):
        interrupted(tmp_path / "a.txt")
    assert names(tmp_path) == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "whole"


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-c", WRITER, str(tmp_path / "theirs.bin")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"writing\n"
        with whole_file(tmp_path / "ours.bin") as ours:
            (tmp_path / ".other.tmp.txt").touch()
            remove_unfinished(tmp_path, ".bin")
            assert len(names(tmp_path)) == 3
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            remove_unfinished(tmp_path, ".bin")
            assert names(tmp_path) == sorted([ours.name, ".other.tmp.txt"])
    assert names(tmp_path) == [".other.tmp.txt", "ours.bin"]
