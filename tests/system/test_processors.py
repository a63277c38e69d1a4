"""A process counts the processors that its affinity mask and the quotas of its control groups allow."""

import os
from pathlib import Path

import pytest

from labkit.system import processors
from labkit.system.cgroups import own_groups
from labkit.system.processors import BINDINGS, cpu_quota, usable_processors

V2 = "0::/outer/inner\n", "30 23 0:26 / {mount} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "4:memory:/elsewhere\n3:cpu,cpuacct:/outer/inner\n",
    "31 23 0:27 / {mount} rw - cgroup cgroup rw,cpu,cpuacct\n32 23 0:28 / /memory rw - cgroup cgroup rw,memory\n",
)


def groups(tmp_path: Path, texts: tuple[str, str]) -> list[tuple[Path, int]]:
    """Control groups of a process that is two groups deep."""
    (tmp_path / "cgroup").write_text(texts[0])
    (tmp_path / "mountinfo").write_text(texts[1].format(mount=tmp_path / "mount"))
    (tmp_path / "mount" / "outer" / "inner").mkdir(parents=True)
    return list(own_groups("cpu", tmp_path))


@pytest.mark.parametrize(("texts", "version"), [(V2, 2), (V1, 1)])
def test_groups_are_named_from_the_own_one_to_the_root(tmp_path: Path, texts: tuple[str, str], version: int) -> None:
    mount = tmp_path / "mount"
    expected = [(folder, version) for folder in (mount / "outer" / "inner", mount / "outer", mount)]
    assert groups(tmp_path, texts) == expected


def test_without_a_quota_there_is_no_limit(tmp_path: Path) -> None:
    for folder, _ in groups(tmp_path, V2):
        (folder / "cpu.max").write_text("max 100000\n")
    assert cpu_quota(own_groups("cpu", tmp_path)) is None
    assert cpu_quota([]) is None


def test_the_narrowest_quota_counts(tmp_path: Path) -> None:
    inner, outer, root = groups(tmp_path, V2)
    for (folder, _), quota in ((inner, "400000 100000\n"), (outer, "150000 100000\n"), (root, "max 100000\n")):
        (folder / "cpu.max").write_text(quota)
    assert cpu_quota([inner, outer, root]) == 1.5


def test_a_quota_of_the_first_generation(tmp_path: Path) -> None:
    inner, outer, root = groups(tmp_path, V1)
    for (folder, _), quota in ((inner, "250000\n"), (outer, "-1\n")):
        (folder / "cpu.cfs_period_us").write_text("100000\n")
        (folder / "cpu.cfs_quota_us").write_text(quota)
    assert cpu_quota([inner, outer, root]) == 2.5


def test_a_quota_that_changes_is_seen_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner, outer, root = groups(tmp_path, V2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(processors, "_mask_misleads", lambda: False)
    monkeypatch.setattr(processors, "_groups_here", lambda: (inner, outer, root))
    for quota, expected in (("max", 8), ("300000", 3), ("100000", 1), ("max", 8)):
        (outer[0] / "cpu.max").write_text(f"{quota} 100000\n")
        assert usable_processors() == expected


def test_a_quota_of_less_than_one_processor_leaves_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("labkit.system.processors._quota_here", lambda: 0.25)
    assert usable_processors() == 1


def test_a_main_thread_that_openmp_has_bound_does_not_count_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in BINDINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("labkit.system.processors._quota_here", lambda: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    monkeypatch.setattr(processors, "_mask_misleads", processors._mask_misleads.__wrapped__)
    assert usable_processors() == 1
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    assert usable_processors() == os.cpu_count()
