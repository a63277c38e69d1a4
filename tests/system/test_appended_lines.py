"""Lines of a growing file come out whole, wherever its reads end."""

import os
import sys
from pathlib import Path

import pytest

from labkit.system.appended_lines import LONGEST, AppendedLines

WRITTEN = "größer\r\n50 %\r100 %\n\nend".encode()


@pytest.mark.parametrize("size", [1, 2, 3, len(WRITTEN)])
def test_lines_do_not_depend_on_where_reads_end(size: int, tmp_path: Path) -> None:
    echoed: list[str] = []
    with (tmp_path / "output").open("w+b", buffering=0) as file:
        reader = AppendedLines(file.fileno(), echoed.append)
        for start in range(0, len(WRITTEN), size):
            os.write(file.fileno(), WRITTEN[start : start + size])
            reader.read()
        assert "end" not in echoed
        reader.read(last=True)
    assert echoed == ["größer", "50 %", "100 %", "", "end"]


def test_what_was_read_takes_no_room(tmp_path: Path) -> None:
    """A long line is cut, and the file is emptied as it is read, so neither grows with the output."""
    sizes: list[int] = []
    with (tmp_path / "output").open("w+b", buffering=0) as file:
        reader = AppendedLines(file.fileno(), lambda line: sizes.append(len(line)))
        for _ in range(40):
            os.write(file.fileno(), b"x" * (1 << 20))
            reader.read()
        os.write(file.fileno(), b"\nend\n")
        reader.read(last=True)
        file_bytes = os.fstat(file.fileno()).st_blocks * 512
    assert sum(sizes[:-1]) == 40 << 20
    assert max(sizes) == LONGEST
    assert sizes[-1] == len("end")
    assert file_bytes < 20 << 20 or sys.platform != "linux"


def test_a_file_that_grows_faster_than_it_is_read_holds_nobody_up(tmp_path: Path) -> None:
    with (tmp_path / "output").open("w+b", buffering=0) as file:

        def hear(line: str) -> None:
            file.write(b"more\n" * 2)

        reader = AppendedLines(file.fileno(), hear)
        file.write(b"more\n")
        for _ in range(5):
            reader.read()
    assert (tmp_path / "output").stat().st_size == len("more\n") * (2**6 - 1)
