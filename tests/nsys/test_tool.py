"""Nsight Systems is found in its usual places, and its help lists what it supports."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.nsys.installations import fake_nsys, nsys_here, script, without_host_folder
from helpers.nsys.nsys_help import reports, supports

from labkit.nsys import tool
from labkit.nsys.agent import run_with_agent
from labkit.nsys.process import Ended, run
from labkit.nsys.reader.reading import read
from labkit.nsys.tool import Nsys, find_nsys

IMPORTER = "QdstrmImporter"


@pytest.fixture(autouse=True)
def nowhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides nsys on the PATH and in the usual folders, except from tests of the installed one."""
    if "real" in request.fixturenames:
        return
    monkeypatch.delenv("LABKIT_NSYS", raising=False)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(tool.shutil, "which", lambda name: None)
    monkeypatch.setattr(tool, "USUAL_PLACES", ())


@pytest.fixture
def real() -> Nsys:
    return nsys_here()


def installed_nsys() -> Nsys:
    nsys = find_nsys()
    assert nsys is not None
    return nsys


def capture(program: Path, output: Path) -> Ended:
    traced = ("--trace=nvtx", "--sample=none", "--cpuctxsw=none", "--export=sqlite", f"--output={output}")
    source = "import nvtx; nvtx.push_range('a'); nvtx.pop_range()"
    command = [str(program), "profile", *traced, sys.executable, "-c", source]
    return run_with_agent(lambda: run(command, os.environ))


def test_without_an_nsys_none_is_found() -> None:
    assert find_nsys() is None


@pytest.mark.parametrize("place", ["nsys", "bin/nsys", "target-linux-x64/nsys"])
def test_the_environment_names_the_program_or_a_folder_of_it(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = fake_nsys((tmp_path / place).parent)
    for value in (program, program.parent, tmp_path):
        monkeypatch.setenv("LABKIT_NSYS", str(value))
        assert installed_nsys() == Nsys(program, (2024, 5, 1, 113), "2024.5.1.113-abc", None)


def test_a_wrong_name_in_the_environment_is_refused_though_there_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "USUAL_PLACES", (str(fake_nsys(tmp_path / "good")),))
    silent, another_program = (
        script(tmp_path / "silent", {}),
        script(tmp_path / "ls", {"--version": "ls (GNU coreutils) 9.1"}),
    )
    (tmp_path / "text").write_text("not a program")
    (tmp_path / "empty").mkdir()
    reasons = {tmp_path / "none": "No such file", tmp_path / "text": "ermission", tmp_path / "empty": "no nsys in this"}
    for path, reason in (reasons | {silent: "not known", another_program: "coreutils"}).items():
        monkeypatch.setenv("LABKIT_NSYS", str(path))
        with pytest.raises(ValueError, match=rf"got LABKIT_NSYS={path}, expected .*{reason}.*unset LABKIT_NSYS"):
            find_nsys()


def test_the_path_comes_first_and_then_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = ("2023.4.4.54-a", "2024.10.1.2-b", "2024.9.3.0-c")
    for version in versions:
        fake_nsys(tmp_path / version / "bin", version)
    script(tmp_path / "broken" / "bin" / "nsys", {})
    monkeypatch.setattr(tool, "USUAL_PLACES", (f"{tmp_path}/*/bin/nsys",))
    assert installed_nsys().version_text == "2024.10.1.2-b"
    on_path = fake_nsys(tmp_path / "on_path", "2022.4.2.1-d")
    monkeypatch.setattr(tool.shutil, "which", lambda name: str(on_path))
    assert installed_nsys().path == on_path
    script(on_path, {})
    assert installed_nsys().version_text == "2024.10.1.2-b"


@pytest.mark.parametrize(
    ("option", "value", "supported"),
    [
        ("--capture-range", "nvtx", True),
        ("--capture-range", "hotkey", False),
        ("--capture-range-end", "stop", True),
        ("--capture-range-end", "repeat:3", True),
        ("--capture-range-end", "stop-shutdown", False),
        ("--cuda-graph-trace", "node", True),
        ("--cuda-graph-trace", "graph:host-only", True),
        ("--cuda-graph-trace", "kernel", False),
        ("--congestion-percent", "50", True),
        ("--cpu-core-events", "7", True),
        ("--export", "sqlite", True),
        ("--export", "parquetdir", False),
        ("--nvtx-capture", "decode@labkit", True),
        ("--nvtx-domain-exclude", "labkit", True),
        ("--trace", None, True),
        ("--trace", "cuda,nvtx,cublas", True),
        ("--trace", "cuda,opengl", False),
        ("--sample", None, False),
    ],
)
def test_what_it_supports_is_what_its_help_lists(
    option: str, value: str | None, supported: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LABKIT_NSYS", str(fake_nsys(tmp_path)))
    assert supports(installed_nsys(), option, value) is supported


def test_the_real_one_supports_what_captures_use(real: Nsys) -> None:
    options = {
        "--trace": "cuda,nvtx,cublas",
        "--sample": "process-tree",
        "--cpuctxsw": "none",
        "--kill": "none",
        "--export": "sqlite",
        "--force-overwrite": "true",
        "--output": "anything",
        "--cuda-graph-trace": "node",
        "--capture-range": "cudaProfilerApi",
        "--nvtx-capture": "decode@labkit",
        "--env-var": "A=B",
        "--capture-range-end": "repeat:2",
    }
    assert not [option for option, value in options.items() if not supports(real, option, value)]
    assert not supports(real, "--capture-range-end", "never")
    assert not supports(real, "--sing")
    assert {"nvtxgpuproj", "nvtx_gpu_proj_trace"} & reports(real)


def test_a_missing_importer_is_found_and_its_repair_works(
    real: Nsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses Debian's layout: the program is under lib/ARCHITECTURE, the host folder under lib, without a link."""
    program = without_host_folder(real, tmp_path / "lib" / "x86_64-linux-gnu" / "nsight-systems")
    assert real.importer is not None
    host = real.importer.parent.resolve()
    packaged, missing = tmp_path / "lib" / "nsight-systems" / host.name, program.parents[1] / host.name
    packaged.parent.mkdir()
    packaged.symlink_to(host)
    missing.symlink_to(tmp_path / "nowhere")
    ended = capture(program, tmp_path / "before")
    assert [file.name for file in tmp_path.glob("before*")] == ["before.qdstrm"], ended
    monkeypatch.setenv("LABKIT_NSYS", str(program))
    fault = installed_nsys().importer_fault()
    assert fault is not None
    assert fault.repair == f"ln -sfn {packaged} {missing}"
    assert str(fault) == f"{fault.reason}. Repair: {fault.repair}"
    subprocess.run(fault.repair, shell=True, check=True)
    assert installed_nsys().importer_fault() is None
    ended = capture(program, tmp_path / "after")
    assert {file.suffix for file in tmp_path.glob("after*")} == {".nsys-rep", ".sqlite"}, ended
    report, export = (read(tmp_path / f"after{suffix}", cache=False) for suffix in (".nsys-rep", ".sqlite"))
    assert report.source.files == ("after.nsys-rep",)
    assert report.ranges.equals(export.ranges)
    assert report.ranges["name"].tolist() == ["a"]


def test_the_importer_must_run_and_be_of_the_same_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "lib" / "x86_64-linux-gnu" / "nsight-systems"
    monkeypatch.setenv("LABKIT_NSYS", str(fake_nsys(installed / "target-linux-x64")))
    expected_place, packaged = (
        folder / "host-linux-x64" / IMPORTER for folder in (installed, tmp_path / "lib/nsight-systems")
    )
    same_version, other_version = (
        {"--version": "NVIDIA Nsight Systems 2024.5.1.113-abc"},
        {"--version": "NVIDIA Nsight Systems 2022.4"},
    )

    def problem() -> str:
        return str(installed_nsys().importer_fault())

    assert "Repair: install Nsight Systems again" in problem()
    script(packaged, other_version)
    assert "Repair: install Nsight Systems again" in problem()
    script(packaged, same_version)
    assert problem().endswith(f"Repair: ln -sfn {packaged.parent} {expected_place.parent}")
    script(expected_place, other_version)
    assert "another version" in problem()
    script(expected_place, {})
    assert "does not run: not known" in problem()
    script(expected_place, same_version)
    assert problem() == "None"


def test_a_script_that_starts_it_from_elsewhere_is_not_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_NSYS", str(fake_nsys(tmp_path / "cuda" / "bin")))
    assert installed_nsys().importer_fault() is None
