"""Limits of a profiler are reported: a second profiler in the program, and forked processes."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from helpers.nsys.nsight import needs_nsys
from helpers.sweeps import sweep
from helpers.traces.handmade import Recorder

from labkit.nsys.capture.profile import profile
from labkit.nsys.capture.redaction import Redaction
from labkit.nsys.capture.result import CaptureError, CommandFailedError
from labkit.nsys.capture.scrubbing import scrub_trace
from labkit.nsys.capture.verify import Contents, contents_of_torch
from labkit.nsys.timeline.export import write_chrome
from labkit.nsys.trace import TraceError

OWN = """
import torch
x = torch.ones(4)
x + x
print("before", flush=True)
if "{kind}" == "new":
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        x * x
else:
    with torch.autograd.profiler.profile():
        x * x
print("after", flush=True)
"""
FORKS = """
import os, sys, torch
from labkit.stages import Phase, StepRanges

def step():
    with StepRanges() as ranges:
        ranges.begin(Phase.DECODE)
        torch.ones(4) + 1

step()
ends = []
for number in range(3):
    if (pid := os.fork()) == 0:
        step()
        if number == 0:
            os._exit(0)
        if number == 1:
            sys.exit(5)
        raise ValueError("sorry")
    ends.append(os.waitpid(pid, 0)[1] >> 8)
assert ends == [0, 5, 1], ends
"""

FORKED_WORK = """
import os, torch
if (pid := os.fork()) == 0:
    torch.ones(4) + 1
    os._exit(0)
os.waitpid(pid, 0)
"""


@sweep
@pytest.mark.parametrize("kind", ["new", pytest.param("old", marks=pytest.mark.sweep)])
def test_a_program_with_a_profiler_of_its_own_is_told_so_and_does_not_crash(kind: str, tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-c", OWN.format(kind=kind)]
    lines: list[str] = []
    with pytest.raises(
        CommandFailedError,
        match=r"(?s)exit code 1; what was captured is in .*torch\.profiler of its own.*nsys \(source='nsys'\)",
    ) as error_info:
        profile(command, name="run", output=tmp_path, source="torch", tax=False, echo=lines.append)
    assert "before" in lines
    assert "after" not in lines
    assert error_info.value.capture is not None
    assert "aten::add" in set(error_info.value.capture.trace().calls["name"])


@sweep
@pytest.mark.parametrize("source", ["torch", pytest.param("nsys", marks=[needs_nsys, pytest.mark.sweep])])
def test_forked_processes_end_as_usual_and_are_counted(source: str, tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-c", FORKS]
    capture = profile(command, output=tmp_path, source=source, tax=False)  # type: ignore[arg-type]
    assert capture.trace().ranges["name"].astype(str).tolist() == ["decode", "decode/step"]
    (remark,) = capture.record.remarks
    assert remark.startswith("3 processes were forked, which no profiler sees: start workers with spawn")
    assert ("profile under nsys (source='nsys')" in remark) == (source == "torch")


@sweep
@pytest.mark.parametrize(
    ("program", "message"),
    [
        (FORKED_WORK, "1 process was forked, which no profiler sees: start workers with spawn and profile under nsys"),
        pytest.param("print(1)", "the only one that torch.profiler sees; if other processes", marks=pytest.mark.sweep),
    ],
)
def test_a_program_without_work_in_its_first_process_is_told_so(program: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="ran no operator of torch and opened no range") as error_info:
        profile([sys.executable, "-P", "-c", program], output=tmp_path, source="torch")
    assert message in str(error_info.value)
    assert "report" not in str(error_info.value)
    assert list(tmp_path.iterdir()) == []


def test_a_report_of_torch_profiler_is_looked_into_while_it_may_be_empty(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    mark = {"ph": "i", "name": "Record Window End", "pid": 1, "tid": 1, "ts": 5, "s": "g"}
    write = lambda *events: report.write_text(json.dumps({"traceEvents": [mark, *events]}))  # noqa: E731
    write()
    assert contents_of_torch(report) == Contents()
    write({"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 1, "tid": 1, "ts": 1, "dur": 2})
    assert contents_of_torch(report).ranges
    report.write_text('{"traceEvents": 5')
    with pytest.raises(TraceError):
        contents_of_torch(report)


def test_inputs_of_operators_are_left_out() -> None:
    recorder = Recorder()
    recorder.operator("aten::add", 0, 10)
    recorder.kernel(1, 2, 8)
    trace = recorder.trace()
    inputs = pd.Categorical([json.dumps({"values": ['pä"ss']})] * len(trace.calls))
    trace = replace(
        trace,
        calls=trace.calls.assign(inputs=inputs),
        operations=trace.operations.assign(collective=pd.Categorical([inputs[0]] * len(trace.operations))),
    )
    clean = scrub_trace(trace, Redaction({}))
    assert set(clean.calls["inputs"]) == set(clean.operations["collective"]) == {""}
    assert set(clean.calls["name"]) == set(trace.calls["name"])


def test_sizes_of_a_strangers_kernel_are_data_in_what_is_written(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.operator("aten::add", 0, 10)
    recorder.kernel(1, 2, 8)
    trace = recorder.trace()
    hostile = '1], "evil": [2 x 3'
    trace = replace(trace, operations=trace.operations.assign(grid=hostile, block="4 x 5 x 6"))
    trace = replace(trace, operations=trace.operations.astype({"grid": "category", "block": "category"}))
    events = json.loads(write_chrome(trace, tmp_path / "x.json").read_text())["traceEvents"]
    (kernel,) = (event for event in events if event.get("cat") == "kernel")
    assert kernel["args"]["grid"] == ['1], "evil": [2', 3]
    assert kernel["args"]["block"] == [4, 5, 6]
    assert "evil" not in kernel["args"]
