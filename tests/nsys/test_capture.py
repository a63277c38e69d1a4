"""Captures of real programs by nsys and torch.profiler: kept files, their records, and failures."""

import gzip
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.nsys.nsight import NSYS, needs_nsys
from helpers.sweeps import sweep, swept

from labkit.nsys import agent
from labkit.nsys.capture import profile as capture
from labkit.nsys.capture.command import PROFILER_API, Window
from labkit.nsys.capture.profile import profile
from labkit.nsys.capture.record import read_record
from labkit.nsys.capture.result import Capture, CaptureError, CommandFailedError
from labkit.stages import Phase

TOKEN = "hf_planted0123456789"
PLANTED = "planted-in-the-command"
STEPS = 3
GENERATE = """
import os, sys, time
from labkit.stages import Phase, Stage, StepRanges, stage

def generate(steps=3):
    with StepRanges() as ranges:
        for phase in (Phase.PREFILL, *[Phase.DECODE] * steps):
            ranges.begin(phase)
            for layer in range(2):
                with stage(phase, Stage.QKV, layer):
                    time.sleep(0.0005)
"""


def script(folder: Path, text: str) -> list[str]:
    path = folder / "program.py"
    path.write_text(GENERATE + text)
    return [sys.executable, "-P", str(path)]


def names(captured: Capture) -> list[str]:
    """Names of the ranges, in order."""
    return captured.trace().ranges["name"].astype(str).tolist()


def expected(*phases: Phase) -> list[str]:
    step = {phase: [f"{phase}/step", f"{phase}/layer.0/qkv", f"{phase}/layer.1/qkv"] for phase in Phase}
    steps = {Phase.PREFILL: 1, Phase.DECODE: STEPS}
    return [name for phase in phases for name in (str(phase), *step[phase] * steps[phase])]


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Capture:
    folder = tmp_path_factory.mktemp("taken")
    command = script(folder, "generate(); print(os.environ['API_TOKEN'])")
    environment = {"API_TOKEN": TOKEN, "USER": "somebody-here"}
    return profile(command, name="run", output=folder / "out", case={"impl": "mine"}, environment=environment)


@needs_nsys
def test_a_capture_holds_every_range(captured: Capture) -> None:
    assert names(captured) == expected(Phase.PREFILL, Phase.DECODE)
    assert captured.trace().source.profiler == "nsys"


@needs_nsys
def test_the_record_has_command_profiler_environment_and_tax(captured: Capture) -> None:
    record = read_record(captured.record_file)
    assert record == captured.record
    assert record.profiler.startswith("nsys 20")
    assert record.command[-1] == "program.py"
    assert record.case == {"impl": "mine"}
    assert record.environment
    assert record.environment["cores"] >= 1
    assert record.tax
    assert record.tax.phase is Phase.DECODE
    assert record.tax.samples == (STEPS, STEPS)
    assert record.tax.plain_ms >= 1.0


@needs_nsys
def test_nothing_but_capture_and_record_is_kept_and_no_secret_in_them(captured: Capture) -> None:
    kept = sorted(captured.record_file.parent.iterdir())
    assert [file.name for file in kept] == ["run.json", "run.sqlite"]
    for file in kept:
        content = file.read_bytes()
        for secret in (TOKEN, "somebody-here", os.uname().nodename + "\0", str(captured.record_file.parents[1])):
            assert secret.encode() not in content


@needs_nsys
def test_a_window_captures_one_phase_and_no_other(tmp_path: Path) -> None:
    captured = profile(
        script(tmp_path, "generate(1); generate()"), output=tmp_path, window=Window.of_phase(Phase.DECODE, 2), tax=False
    )
    assert names(captured) == expected(Phase.DECODE)
    assert captured.record.window == "decode@labkit"
    assert captured.record.tax is None


@sweep
@needs_nsys
def test_a_function_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    messages = ["decode/lm_head", "decode/sample"]

    def announce() -> None:
        from labkit.stages import Range

        for message in messages:
            with Range(message):
                pass

    captured = profile(announce, output=tmp_path, tax=False)
    assert names(captured) == messages
    assert captured.files[0].name.startswith("announce-")


@needs_nsys
def test_a_failing_program_is_quoted_and_what_was_captured_is_kept(tmp_path: Path) -> None:
    with pytest.raises(CommandFailedError) as error_info:
        profile(script(tmp_path, "generate(); print('disk on fire'); sys.exit(5)"), output=tmp_path)
    assert error_info.value.exit_code == 5
    assert "exit code 5" in str(error_info.value)
    assert "disk on fire" in str(error_info.value)
    assert error_info.value.capture is not None
    assert names(error_info.value.capture) == expected(Phase.PREFILL, Phase.DECODE)
    assert error_info.value.capture.record.exit_code == 5


@pytest.fixture
def losing_agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """File with the number of captures in which the installed nsys still loses its agent.

    A real nsys loses it rarely, on a busy machine.
    """
    losses, program = tmp_path / "losses", tmp_path / "nsys"
    lose = f"echo $(($(cat {losses}) - 1)) > {losses}; echo 'End of file'; exit 1"
    condition = f'[ "$1 $2" != "profile --help" ] && [ "$1" = profile ] && [ $(cat {losses}) -gt 0 ]'
    assert NSYS is not None
    program.write_text(f'#!/bin/sh\nif {condition}; then {lose}; fi\nexec {NSYS.path} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("LABKIT_NSYS", str(program))
    return losses


@sweep
@needs_nsys
def test_nsys_that_loses_its_agent_is_started_again(
    losing_agents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "OTHERS_S", 1.0)  # other tests may capture meanwhile
    command = script(tmp_path, "generate()")
    losing_agents.write_text("1")
    assert names(profile(command, output=tmp_path / "out", tax=False)) == expected(Phase.PREFILL, Phase.DECODE)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", command[-1]]
    losing_agents.write_text("1")
    captured = profile(torchrun, output=tmp_path / "ranks", ranks="per-rank", tax=False)
    assert len(captured.files) == 2
    losing_agents.write_text(str(agent.ATTEMPTS))
    with pytest.raises(CommandFailedError, match=r"nsys lost its agent 3 times before the command began.*run it again"):
        profile(command, output=tmp_path / "out", tax=False)


@needs_nsys
@pytest.mark.parametrize(
    ("text", "window", "message"),
    [
        ("print('nothing to see')", None, "holds no NVTX range.*announces none"),
        ("generate()", Window("breakfast@labkit"), r"'breakfast@labkit' never opened;"),
        ("generate()", Window.of_phase(Phase.DECODE, 2), "never opened 2 times"),
        ("pid = os.fork()\nif pid == 0: generate(); os._exit(0)\nos.waitpid(pid, 0)", None, "forked process"),
    ],
)
def test_an_empty_capture_says_which_cause_it_was(
    text: str, window: Window | None, message: str, tmp_path: Path
) -> None:
    command = script(tmp_path, text)
    with pytest.raises(CaptureError, match=message):
        profile(command, output=tmp_path / "out", window=window)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """Folder on a disk of 200 kB, which no capture fits on."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True)  # fails while a process of the run still uses the disk


@needs_nsys
@pytest.mark.parametrize("full_folder", ["the folder of the capture", "TMPDIR"])
def test_a_full_disk_is_named_and_nothing_is_left(full_folder: str, full_disk: Path, tmp_path: Path) -> None:
    output = full_disk if full_folder != "TMPDIR" else tmp_path / "out"
    environment = {"TMPDIR": str(full_disk)} if full_folder == "TMPDIR" else {}
    with pytest.raises(CaptureError, match=r"disk is full \(0 MB free\)"):
        profile(script(tmp_path, "generate()"), output=output, environment=environment)
    assert not output.exists() or not list(output.iterdir())


@sweep
@needs_nsys
def test_ctrl_c_ends_the_program_and_keeps_the_report(tmp_path: Path) -> None:
    program = script(tmp_path, "generate(1); print('ready', flush=True); time.sleep(60)")
    command = [
        str(Path(sys.executable).parent / "labkit"),
        "profile",
        "--name",
        "stopped",
        "--output",
        str(tmp_path),
        "--",
        *program,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "ready" in line:
                break
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    assert process.returncode == 130
    assert f"interrupted; kept: {tmp_path / 'stopped.sqlite'}" in rest
    record = read_record(tmp_path / "stopped.json")
    assert record.remarks == ("interrupted by Ctrl-C",)
    assert "prefill/step" in names(Capture((tmp_path / "stopped.sqlite",), tmp_path / "stopped.json", record))


@sweep
def test_without_nsys_torch_profiler_sees_the_same_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "find_nsys", lambda: None)
    text = """
import torch
with torch.inference_mode():
    generate()
    torch.ones(3) + 1
    for word in (*sys.argv[1:], os.environ["API_TOKEN"]):
        with torch.profiler.record_function(f"user {word}"):
            print(word)
"""
    command = [*script(tmp_path, text), f"--hub-token={PLANTED}", "https://ada:tiger-lily@example.org/model"]
    lines: list[str] = []
    captured = profile(
        command,
        name="run",
        output=tmp_path / "out",
        environment={"API_TOKEN": TOKEN},
        echo=lines.append,
        case={"x": PLANTED},
    )
    *stages, first, second, third = names(captured)
    assert stages == expected(Phase.PREFILL, Phase.DECODE)
    assert (first, third) == ("user --hub-token=<redacted>", "user <redacted>")
    assert second == "user https://ada:<redacted>@example.org/model"
    assert captured.record.command[-2:] == ("--hub-token=<redacted>", "https://ada:<redacted>@example.org/model")
    kept = captured.record_file.read_text() + gzip.decompress(captured.files[0].read_bytes()).decode()
    for secret in (TOKEN, PLANTED, "tiger-lily", str(tmp_path)):
        assert secret not in kept + str(lines)
    assert captured.record.profiler.startswith("torch.profiler ")
    assert captured.trace().source.profiler == "torch.profiler"
    assert "aten::add" in set(captured.trace().calls["name"])
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["run.json", "run.json.gz"]
    assert captured.record.tax is not None


@sweep
def test_torch_profiler_can_wait_for_a_phase(tmp_path: Path) -> None:
    command = script(tmp_path, "import torch; generate(1); generate()")
    captured = profile(command, output=tmp_path, window=Window.of_phase(Phase.DECODE, 2), source="torch", tax=False)
    assert names(captured) == expected(Phase.DECODE)


@sweep
def test_torch_profiler_can_wait_for_the_calls_of_the_program(tmp_path: Path) -> None:
    """The first pair of calls is passed over, and the profiler of CUDA, which this machine may lack, is not started."""
    program = """
import torch
for steps in (1, 2, 3):
    with torch.cuda.profiler.profile():
        generate(steps)
    generate(steps)
"""
    captured = profile(
        script(tmp_path, program), output=tmp_path, window=Window(PROFILER_API, 2), source="torch", tax=False
    )
    assert names(captured).count("decode/step") == 2
    assert captured.record.window == PROFILER_API


@sweep
@pytest.mark.parametrize("source", swept(["nsys", "torch"], ["nsys"]))
def test_every_rank_has_a_capture(source: str, tmp_path: Path) -> None:
    if source == "nsys" and capture.find_nsys() is None:
        pytest.skip("nsys is not installed")
    program = script(tmp_path, "generate()")[-1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", program]
    captured = profile(torchrun, name="run", output=tmp_path / "out", ranks="per-rank", source=source, tax=False)  # type: ignore[arg-type]
    assert [file.name.partition(".")[0] for file in captured.files] == ["run-r0", "run-r1"]
    trace = captured.trace()
    assert sorted(trace.processes["rank"]) == [0, 1]
    assert trace.ranges.groupby("process").size().tolist() == [len(expected(*Phase))] * 2


@sweep
@needs_nsys
def test_one_report_of_all_ranks_tells_them_apart(tmp_path: Path) -> None:
    program = script(tmp_path, "generate()")[-1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", program]
    trace = profile(torchrun, output=tmp_path / "out", tax=False).trace()
    announced = trace.ranges["process"].unique()
    assert sorted(trace.processes["rank"].iloc[announced]) == [0, 1]


@sweep
@needs_nsys
def test_nvtx_that_drops_ranges_does_not_drop_ours(tmp_path: Path) -> None:
    """nvtx 0.2.17 drops ranges under nsys 2022 and 2023; labkit's arrive, and the loss of others is reported."""
    newer = tmp_path / "newer"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(newer), "nvtx==0.2.17"]
    if subprocess.run(pip, check=False, capture_output=True).returncode:
        pytest.skip("nvtx 0.2.17 could not be installed: no package index is reached")
    environment = {"PYTHONPATH": os.pathsep.join([str(newer), os.environ.get("PYTHONPATH", "")])}
    lines: list[str] = []
    command = [sys.executable, script(tmp_path, "import nvtx; generate()")[-1]]
    captured = profile(command, output=tmp_path / "out", environment=environment, tax=False, echo=lines.append)
    assert names(captured) == expected(*Phase)
    foreign = [sys.executable, "-c", "import nvtx, time\nwith nvtx.annotate('mine', domain='mine'): time.sleep(0.01)"]
    assert NSYS is not None
    if NSYS.version < (2024,):
        assert any("drops every range" in line for line in lines)
        with pytest.raises(CaptureError, match=r"pip install nvtx==0\.2\.11"):
            profile(foreign, output=tmp_path / "out", environment=environment, tax=False)
