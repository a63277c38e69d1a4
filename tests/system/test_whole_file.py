"""Files are written whole or not at all, and the unfinished files of killed writers are removed."""

import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from labkit.system.errors import UserError
from labkit.system.whole_file import (
    check_no_input,
    check_output_file,
    check_two_outputs,
    remove_unfinished,
    whole_file,
    write_whole,
)

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


def mode_of(path: Path) -> str:
    return f"{path.stat().st_mode & 0o7777:o}"


def test_a_link_stays_and_its_target_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "kept.txt").write_text("old")
    (tmp_path / "middle").symlink_to("far/kept.txt")
    (tmp_path / "link").symlink_to(tmp_path / "middle")
    (tmp_path / "new").symlink_to("far/new.txt")
    for link in ("link", "new"):
        write_whole(tmp_path / link, link)
        assert (tmp_path / link).is_symlink()
    assert (tmp_path / "far" / "kept.txt").read_text() == "link"
    assert (tmp_path / "far" / "new.txt").read_text() == "new"
    assert (tmp_path / "middle").is_symlink()
    assert names(tmp_path / "far") == ["kept.txt", "new.txt"]


@pytest.mark.parametrize("umask", ["022", "077", "002"])
def test_a_new_file_has_what_the_umask_leaves_and_a_replaced_one_its_mode(tmp_path: Path, umask: str) -> None:
    command = "import os, sys; os.umask(int(sys.argv[2], 8)); exec(sys.argv[1])"
    write = """
from pathlib import Path
from labkit.system.whole_file import whole_file
Path("private").touch(mode=0o600)
Path("open").touch(); Path("open").chmod(0o664)
for name in ("new", "private", "open"):
    with whole_file(Path(name)) as path:
        path.write_text(name)
        print(f"{path.stat().st_mode & 0o777:o}", end=" ")
"""
    process = subprocess.run(
        [sys.executable, "-P", "-c", command, write, umask], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    new = f"{0o666 & ~int(umask, 8):o}"
    assert process.stdout.split() == [new, "600", "664"]  # the same modes as while the files were being written
    assert [mode_of(tmp_path / name) for name in ("new", "private", "open")] == process.stdout.split()


def test_devices_and_pipes_are_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as executor:
        received = executor.submit(pipe.read_text)
        write_whole(pipe, "through the pipe")
        assert received.result(10) == "through the pipe"
    assert pipe.is_fifo()
    link = tmp_path / "nowhere"
    link.symlink_to("/dev/null")
    for device in (Path("/dev/null"), link):
        write_whole(device, "gone")
        assert device.is_char_device()
    assert names(tmp_path) == ["nowhere", "pipe"]


@pytest.mark.parametrize("into", ["pipe", "file"])
def test_its_own_stdout_gets_the_content_in_order(tmp_path: Path, into: str) -> None:
    command = (
        "from pathlib import Path; from labkit.system.whole_file import write_whole; print('before'); "
        "write_whole(Path('/dev/stdout'), 'content\\n'); print('after')"
    )
    arguments = [sys.executable, "-P", "-c", command]
    if into == "pipe":
        output = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout
    else:
        with (tmp_path / "output").open("w") as file:
            subprocess.run(arguments, stdout=file, check=True)
        output = (tmp_path / "output").read_text()
    assert output == "before\ncontent\nafter\n"


def test_what_cannot_be_written_is_named_and_stays(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="which is a folder; name a file in it"):
        write_whole(tmp_path, "no file")
    (tmp_path / "round").symlink_to("round")
    for target in (Path("/dev/full"), tmp_path / "round", Path("/dev/null/below"), Path("/proc/none")):
        with pytest.raises(OSError, match=re.escape(str(target))):
            write_whole(target, "no room" * 10_000)
    assert names(tmp_path) == ["round"]


def test_a_full_disk_names_the_target(tmp_path: Path) -> None:
    def fill() -> None:
        with whole_file(tmp_path / "a.txt"), Path("/dev/full").open("wb", buffering=0) as full:
            full.write(b"too much")

    with pytest.raises(OSError, match=r"No space left on device: '.*a\.txt'"):
        fill()
    assert names(tmp_path) == []


def test_a_writable_file_or_none_in_a_folder_that_is_not_writable_is_refused_beforehand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    present, absent, link = tmp_path / "present.txt", tmp_path / "absent.txt", tmp_path / "nowhere"
    present.touch()
    link.symlink_to("/dev/null")
    for target in (present, absent, link):
        check_output_file(target)
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != tmp_path)  # root may write everywhere
    for target in (present, absent):
        with pytest.raises(PermissionError, match=re.escape(str(target))):
            check_output_file(target)
    check_output_file(link)  # nothing is written next to a device
    assert names(tmp_path) == ["nowhere", "present.txt"]


def test_an_output_that_is_an_input_is_refused(tmp_path: Path) -> None:
    trace, link, hard_link = tmp_path / "trace.json", tmp_path / "link.json", tmp_path / "hard.json"
    trace.write_text("{}")
    link.symlink_to(trace)
    hard_link.hardlink_to(trace)
    for output in (trace, link, hard_link, tmp_path / "." / "trace.json"):
        with pytest.raises(UserError, match=r"which is the input .*; name another file"):
            check_no_input(output, [tmp_path / "absent.json", trace])
    check_no_input(tmp_path / "other.json", [trace, tmp_path / "absent.json"])
    check_no_input(Path("/dev/null"), [Path("/dev/null")])


def test_two_outputs_that_are_one_file_are_refused(tmp_path: Path) -> None:
    page, link = tmp_path / "page.md", tmp_path / "link.md"
    link.symlink_to(page)  # page.md does not exist yet
    for output in (page, link, tmp_path / "." / "page.md"):
        with pytest.raises(UserError, match=r"got .* as --page and as --output; name two files"):
            check_two_outputs(page=page, output=output)
    check_two_outputs(page=page, output=tmp_path / "cells.jsonl")
    check_two_outputs(page=None, output=page)
    check_two_outputs(page=Path("/dev/null"), output=Path("/dev/null"))
