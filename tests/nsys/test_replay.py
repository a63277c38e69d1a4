"""Recorded operators run again: the script is complete and runs, with tensors of the shapes in the trace."""

from __future__ import annotations

import ast
import io
import json
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.sweeps import sweep
from helpers.traces.handmade import Recorder
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from torch.profiler import ProfilerActivity, profile

from labkit.harness.replay import RecordedCall, _table, arguments, measure, operator
from labkit.nsys.reader.reading import read
from labkit.nsys.tables.replay import replay_script, replayable, write_replay
from labkit.nsys.trace import INPUTS, Trace, TraceError
from labkit.system.errors import UserError


def work() -> None:
    a = torch.ones(6, 5).t()
    torch.addmm(torch.ones(7), a, torch.ones(6, 7))
    torch.nn.functional.embedding(torch.tensor([[0, 3], [2, 1]]), torch.ones(4, 8))
    torch.cat([torch.ones(2, 3), torch.ones(4, 3)], dim=0)
    torch.softmax(torch.ones(3, 9).expand(2, 3, 9), dim=-1)
    torch.nn.functional.conv2d(torch.ones(1, 3, 8, 8), torch.ones(4, 3, 3, 3), stride=2, padding=1)
    torch.ones(3, dtype=torch.bfloat16).mul_(2.5)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Trace by torch.profiler of some operators."""
    path = tmp_path_factory.mktemp("recorded") / "ops.json"
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        work()
    profiler.export_chrome_trace(str(path))
    return read(path, cache=False)


def call_of(script: Path) -> RecordedCall:
    call = runpy.run_path(str(script))["CALL"]
    assert isinstance(call, RecordedCall)
    return call


@pytest.mark.parametrize("op", ["aten::addmm", "embedding", "cat", "_softmax", "conv2d", "mul_"])
def test_an_operator_runs_again_with_its_shapes(op: str, recorded: Trace, tmp_path: Path) -> None:
    call = call_of(write_replay(recorded, op, tmp_path / "replay.py"))
    values = arguments(call, operator(call), "cpu")
    for value, dims, strides in zip(values.values(), call.dims, call.strides, strict=False):
        if isinstance(value, torch.Tensor):
            assert tuple(value.shape) == dims
            assert value.stride() == strides
    timing = measure(call, "cpu", calls=3)
    assert len(timing.warm_us) == len(timing.cold_us) == 3
    assert min(timing.warm_us) > 0


@sweep
def test_the_script_stands_alone(recorded: Trace, tmp_path: Path) -> None:
    script = write_replay(recorded, "addmm", tmp_path / "replay_addmm.py")
    process = subprocess.run(
        [sys.executable, script, "--device", "cpu"], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert process.returncode == 0, process.stderr
    assert "aten::addmm of 7, 5x6, 6x7 on CPU" in process.stdout
    assert {"cold,", "warm,", "traced"} <= set(process.stdout.replace("│", " ").split())


def test_the_time_of_an_operator_includes_those_within_it() -> None:
    recorder = Recorder()
    recorder.operator("aten::linear", 0, 60)
    recorder.operator("aten::addmm", 1, 50)
    recorder.kernel(2, 10, 30)
    trace = recorder.trace()
    table = replayable(replace(trace, calls=trace.calls.assign(inputs='{"dims": [[2, 2]], "types": ["float"]}')))
    assert table.set_index("name")["median_ns"].to_dict() == {"aten::linear": 20_000, "aten::addmm": 20_000}


def test_what_cannot_be_replayed_is_said(recorded: Trace, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"got the operator 'aten::adm' \(did you mean .*such as aten::"):
        write_replay(recorded, "aten::adm", tmp_path / "x.py")
    with pytest.raises(TraceError, match="got 9 as the place of the inputs, expected 1 to 1"):
        write_replay(recorded, "addmm", tmp_path / "x.py", nth=9)
    with pytest.raises(TraceError, match="got a trace without inputs of operators"):
        write_replay(Recorder().trace(), "addmm", tmp_path / "x.py")
    assert not list(tmp_path.iterdir())
    call = call_of(write_replay(recorded, "addmm", tmp_path / "replay.py"))
    with pytest.raises(UserError, match=r"which this PyTorch .* does not have"):
        measure(replace(call, name="vllm::moe_forward"), "cpu")
    with pytest.raises(UserError, match="fails with made-up data"):
        measure(replace(call, dims=((7,), (5, 6), (99, 7), *call.dims[3:])), "cpu")


CONSTANT = """'An operator of PyTorch as a trace recorded it. Options: --device cpu.'
from labkit.harness.replay import RecordedCall, replay
if __name__ == '__main__':
    replay(CALL)"""
TEXTS = st.text(max_size=20) | st.sampled_from(
    [
        '"""\nraise SystemExit(99)\n"""',
        "'''",
        "{call} {0.__class__}",
        "a\nraise SystemExit(99)",
        "x\\",
        "# \r\x85\u2028raise SystemExit(99)",
        "\ud800",
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | TEXTS, lambda inner: st.lists(inner, max_size=3)
)


@pytest.mark.parametrize("examples", [60, pytest.param(2000, marks=sweep)])
def test_no_text_of_a_trace_becomes_code_of_the_script(examples: int) -> None:
    @settings(max_examples=examples, derandomize=True, deadline=None, database=None)
    @given(name=TEXTS, file=TEXTS, device=TEXTS, inputs=st.fixed_dictionaries(dict.fromkeys(INPUTS, st.lists(JSON))))
    def check(name: str, file: str, device: str, inputs: dict[str, object]) -> None:
        row = {"name": f"aten::{name}", "inputs": json.dumps(inputs), "count": 2, "median_ns": 1.5e4, "on_gpu": True}
        script = replay_script(row, (file,), device)
        script.encode()
        about, load, files, calls, call, start = ast.parse(script).body
        constant = "\n".join(ast.unparse(part) for part in (about, load, start))
        assert constant == CONSTANT
        assert ast.literal_eval(files.value) == (file,)  # type: ignore[attr-defined]
        assert ast.literal_eval(calls.value) == 2  # type: ignore[attr-defined]
        keywords = {word.arg: ast.literal_eval(word.value) for word in call.value.keywords}  # type: ignore[attr-defined]
        assert (keywords["name"], keywords["traced_on"]) == (f"aten::{name}", device)

    check()


def test_a_script_prints_names_as_text_and_calls_operators_only() -> None:
    """Names of a trace do not act as markup or reach other attributes of torch, and open no file."""
    call = RecordedCall("aten::relu", ((2,),), ("float",), ((1,),), ("",), 1.0, "[/bold] of [red]")
    out = Console(file=io.StringIO(), width=200)
    out.print(_table(call, measure(call, "cpu", calls=2)))
    assert "traced on [/bold] of [red]" in out.file.getvalue()  # type: ignore[attr-defined]
    for name in ("load_library::__func__", "__class__::mro", "aten::__class__", "aten::__name__"):
        with pytest.raises(UserError, match="does not have"):
            measure(replace(call, name=name), "cpu")
    opens_file = replace(call, name="aten::from_file", dims=((), (), ()), types=("", "", ""), values=("x", "True", "8"))
    with pytest.raises(UserError, match="works on a file that the trace names"):
        measure(opens_file, "cpu")
