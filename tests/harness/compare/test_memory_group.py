"""A memory cgroup holds processes to its limit and is removed after its owner ends, even if the owner is killed."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from labkit.harness.compare.memory_group import PREFIX, MemoryGroup

LIMIT = 64 << 20
TAKE = "import sys; sys.stdin.readline(); taken = bytearray(int(sys.argv[1])); print(len(taken))"
HOLD = (
    "import sys; from labkit.harness.compare.memory_group import MemoryGroup\n"
    "group = MemoryGroup.make(1 << 26); print(group.folder, flush=True); sys.stdin.readline()"
)


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    memory_group = MemoryGroup.make(LIMIT)
    if memory_group is None:
        pytest.skip("no memory cgroup can be made here")
    with memory_group:
        yield memory_group


@contextmanager
def python(code: str, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("size", "killed"), [(LIMIT // 4, False), (2 * LIMIT, True)])
def test_only_who_takes_more_than_the_limit_is_killed(group: MemoryGroup, size: int, killed: bool) -> None:
    with python(TAKE, str(size)) as process:
        group.add(process.pid)
        process.communicate("\n")
        assert (process.returncode != 0) == killed
    assert group.exceeded == killed
    assert group.peak_bytes is None or min(size, LIMIT // 2) <= group.peak_bytes <= LIMIT


def test_what_a_killed_owner_left_is_removed_by_the_next_and_nothing_of_a_living_one(group: MemoryGroup) -> None:
    with python(HOLD) as owner:
        assert owner.stdout is not None
        owned = owner.stdout.readline().strip()
        assert owned.startswith(str(group.folder.parent / PREFIX))
        with MemoryGroup.make(LIMIT) or group:
            assert (group.folder.parent / owned).is_dir()
        owner.kill()
        owner.wait()
        assert (group.folder.parent / owned).is_dir()
    with MemoryGroup.make(LIMIT) or group:
        assert not (group.folder.parent / owned).exists()
        assert group.folder.is_dir()


def test_nothing_is_left_of_a_group_whose_process_has_just_been_killed(group: MemoryGroup) -> None:
    own = MemoryGroup.make(LIMIT)
    assert own is not None
    with own, python(TAKE, "1") as process:
        own.add(process.pid)
    assert not own.folder.exists()
    assert group.folder.exists()
