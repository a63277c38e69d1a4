"""No file keeps labkit waiting: a pipe is refused, or read if someone writes to it."""

import os
import threading
import time
from pathlib import Path

import pytest

from labkit.system import input_file
from labkit.system.errors import UserError
from labkit.system.input_file import open_file, read_file, read_stream

pytestmark = pytest.mark.timeout(60)
REFUSED = r"got .*pipe.*, which is a pipe; expected a trace: write its content to a file first"


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


def test_a_pipe_is_refused_at_once_with_or_without_a_writer(pipe: Path, tmp_path: Path) -> None:
    (tmp_path / "link-to-pipe").symlink_to(pipe)
    for path in (pipe, tmp_path / "link-to-pipe"):
        for read in (open_file, read_file):
            with pytest.raises(UserError, match=REFUSED):
                read(path, "a trace")
    reader, writer = os.pipe()
    with pytest.raises(UserError, match=r"which is a pipe; expected a trace"):
        read_file(Path(f"/dev/fd/{reader}"), "a trace")
    os.close(reader)
    os.close(writer)


def test_files_and_their_errors_are_as_ever(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"abc" * 100_000)
    assert read_file(file, "text") == file.read_bytes() == read_stream(file, 10)
    with open_file(file, "text") as opened:
        assert os.get_blocking(opened.fileno())
        assert opened.read(3) == b"abc"
    for path, error in ((tmp_path, IsADirectoryError), (tmp_path / "none", FileNotFoundError)):
        for read in (lambda path: read_file(path, "text"), lambda path: read_stream(path, 10)):
            with pytest.raises(error) as raised:
                read(path)
            assert raised.value.filename == str(path)


def test_a_device_is_no_file_and_a_stream_has_a_limit() -> None:
    with pytest.raises(UserError, match="got /dev/zero, which is a device; expected text"):
        read_file(Path("/dev/zero"), "text")
    assert read_stream(Path("/dev/zero"), 200_000) == bytes(200_000)
    assert read_stream(Path("/dev/null"), 10) == b""


def test_a_pipe_that_nobody_writes_to_is_refused(pipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_file, "WRITER_S", 0.2)
    with pytest.raises(UserError, match=r"got .*pipe, a pipe that nobody writes to; write to it within 0.2 s"):
        read_stream(pipe, 10)


@pytest.mark.parametrize("parts", [[], [b"a" * 300_000], [b"a", b"b" * 100_000, b"c"]], ids=len)
def test_what_a_writer_writes_is_read_however_slow_it_is(
    parts: list[bytes], pipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_file, "WRITER_S", 0.2)
    opened = threading.Event()

    def write() -> None:
        with pipe.open("wb", buffering=0) as stream:
            opened.set()
            for part in parts or [b""]:
                time.sleep(0.4)  # longer than a writer has to open the pipe
                view = memoryview(part)
                while view:
                    view = view[stream.write(view) :]

    held = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # the writer can open the pipe before it is read
    writer = threading.Thread(target=write)
    writer.start()
    opened.wait()
    try:
        assert read_stream(pipe, 1 << 20) == b"".join(parts)
    finally:
        os.close(held)
        writer.join()
