"""The rate of a disk is measured with reads past the page cache; the cached bytes of a file are counted."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from labkit.harness import disk
from labkit.system import page_cache

SIZE = 3 * disk.BLOCK


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(SIZE + 100))
    return path


def test_reading_for_the_rate_leaves_nothing_in_the_page_cache(file: Path) -> None:
    before = page_cache.make_cold(file)
    if before is None:
        pytest.skip("this system does not tell what its page cache holds (Linux 6.5 does)")
    assert before == 0
    assert disk.read_rate_gb_s(file, 0.01) > 0
    assert page_cache.cached_bytes(file) == 0


def test_what_was_read_is_counted_until_it_is_dropped(file: Path) -> None:
    file.read_bytes()
    if (cached := page_cache.cached_bytes(file)) is None:
        pytest.skip("this system does not tell what its page cache holds (Linux 6.5 does)")
    assert cached >= SIZE
    assert page_cache.make_cold(file) == 0


def test_a_file_system_that_refuses_direct_reads_is_read_through_the_page_cache(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def refusing(path: Any, flags: int, *mode: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return opened(path, flags, *mode)

    monkeypatch.setattr(disk.os, "open", refusing)
    assert disk.read_rate_gb_s(file, 0.01) > 0


def test_a_file_that_is_too_short_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"123")
    with pytest.raises(ValueError, match="of 3 bytes; expected at least 4096"):
        disk.read_rate_gb_s(tmp_path / "short")


def test_the_disk_of_a_folder_is_probed_with_a_file_that_is_gone_afterwards(tmp_path: Path) -> None:
    assert disk.folder_rate_gb_s(tmp_path, 0.01) > 0
    assert list(tmp_path.iterdir()) == []
