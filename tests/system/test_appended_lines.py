"""Lines come out whole, wherever the reads of a file that grows have ended."""

import os
from pathlib import Path

import pytest

from labkit.system.appended_lines import AppendedLines

WRITTEN = "größer\r\n50 %\r100 %\n\nend".encode()


@pytest.mark.parametrize("size", [1, 2, 3, len(WRITTEN)])
def test_lines_do_not_depend_on_where_reads_end(size: int, tmp_path: Path) -> None:
    echoed: list[str] = []
    with (tmp_path / "said").open("w+b", buffering=0) as file:
        reader = AppendedLines(file.fileno(), echoed.append)
        for at in range(0, len(WRITTEN), size):
            os.write(file.fileno(), WRITTEN[at : at + size])
            reader.read()
        assert "end" not in reader.lines
        reader.read(last=True)
    assert echoed == reader.lines == ["größer", "50 %", "100 %", "", "end"]
