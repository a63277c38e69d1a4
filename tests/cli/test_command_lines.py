"""Whatever its arguments, a command ends with an exit code and a few plain lines."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.models.chat_models import chat_checkpoint
from helpers.processes.command_line import Labkit, command_line
from helpers.sweeps import paired, sweep
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from labkit.cli import app
from labkit.harness.compare.side_process import SideProcess
from labkit.system.errors import RunError

LABKIT = (sys.executable, "-P", "-c", "from labkit.cli.main import main; main()")
ESCAPE = "\x1b]0;title\x07\x1b[2J"
SMALL = ("--prompt", "4", "--new", "2", "--threads", "1", "--rounds", "2")
LINES: dict[str, tuple[str, ...]] = {  # a small valid command line for each command that needs one
    "compare": ("tiny-gpt2", *SMALL),
    "kernels": ("--model", "tiny-gpt2", "--op", "residual", "--rounds", "2", "--context", "4", "--threads", "1"),
    "bench-methods": ("tiny-gpt2", "--methods", "fused", "--batch", "1", *SMALL),
    "diff": ("a.jsonl", "b.jsonl", "--metric", "ttft", "--tolerance", "0.1"),
    "evaluate": ("tiny-gpt2", "--tokens", "64", "--window", "32", "--dtype", "float32", "--text", "words.txt"),
    "plan-batch": ("tiny-gpt2", "--memory-gb", "1", "--disk-gb-s", "1", "--gflops", "9", "--dtype", "bfloat16"),
    "generate": ("tiny-gpt2", "--prompt", "hello", "--new", "2", "--seed", "1", "--temperature", "0.5"),
    "chat": ("chatty", "--new", "2", "--system", "be kind", "--threads", "1"),
    "tune": ("--model", "tiny-gpt2", "--dtype", "nothing"),
    "sides": ("--json",),
    "run": ("absent.ipynb", "-p", "model", "gpt2", "--timeout", "5"),
    "profile": ("--stage", "decode", "--range", "x", "--batch", "1"),
    "stages": ("made.json", "--by", "stage"),
    "explain": ("made.json", "made.json", "--phase", "decode"),
    "timeline": ("made.json", "--window", "0:1", "--output", "page.html"),
    "lab": ("copies", "--port", "9999"),
    "launch": ("--tp", "1", "--threads", "1", "script.py"),
    "peers": ("list",),
    "trace": ("kernels", "made.json", "--top", "3", "--csv"),
    "notebooks": ("copy", "copies"),
}
VALUES = (
    *("", " ", "nan", "inf", "-inf", "1e999", "-1", "0", "1", "2", "1.5", "10" * 15, "9" * 5000, "1,2", "None", "[]"),
    *("{}", '{"weight": 1}', "x", "é" * 99, "漢", ESCAPE, "a\udcff", "a\nb", "%s", "{0}", "[red]", "/dev/null", "."),
    *("/dev/zero", "/dev/full", "/nonexistent/below", "~", "-", "--", "-h", "--json", "--output", "-p", "*", "(", ":"),
    *("hf-eager", "fused", "int8", "tiny-llama", "decode", "auto", "\u202e", "made.json", "words.txt", "\\"),
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an input of each kind. Slow work, and work in other processes, is replaced by an error."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RunError("it would begin here")

    monkeypatch.chdir(tmp_path)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # a drawn ~ leads there
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("execv", "execve"):
        monkeypatch.setattr(os, name, fail)
    monkeypatch.setattr(SideProcess, "__init__", fail)
    monkeypatch.setattr("labkit.notebooks.execution._execute", fail)
    monkeypatch.setattr("labkit.nsys.capture.profile.profile", fail)
    monkeypatch.setattr("labkit.launcher.rendezvous.Rendezvous.wait_until_open", fail)
    (tmp_path / "words.txt").write_text("some words of a text " * 99)
    event = {"ph": "X", "cat": "kernel", "name": "k", "ts": 0, "dur": 1, "pid": 1, "tid": 1}
    (tmp_path / "made.json").write_text(json.dumps({"traceEvents": [event]}))
    chat_checkpoint(tmp_path / "chatty", layers=1)
    return tmp_path


@pytest.fixture
def labkit(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Labkit:
    run = command_line(monkeypatch, capsys)

    def with_stdin(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
        return run(*arguments)

    return with_stdin


def check(line: tuple[str, ...], result: tuple[int, str, str]) -> None:
    code, output, errors = result
    assert code in (0, 1, 2, 130), line
    assert "Traceback" not in output + errors
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", output + errors), line
    assert not re.search(r"PosixPath|<class|Input should|\[Errno|object at 0x", errors), (line, errors)
    if code == 2:
        assert len(errors.splitlines()) <= 6 or "Usage" in output + errors, (line, errors)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (("compare", "tiny-gpt2", "--threads", "100000"), "got threads = 100000, expected at most"),
        (("compare", "tiny-gpt2", "--rounds", f"1{'0' * 30}"), "expected at most"),
        (("models", "a", "b"), "Got unexpected extra argument 'b'; "),
        (("models", "nosuch"), "unknown model 'nosuch'; expected a checkpoint folder"),
        (("models", "granite", "--all"), "got both granite and --all; give one of them"),
        (("models", "--page", "table.md"), "--page takes the table of --all; add --all"),
        (("compare", "tiny-gpt2", "--batch", "many"), "got many, expected an integer"),
        (("compare", "tiny-gpt2", "--output", "words.txt"), "there is a file of that name"),
        (("generate", "--prompt", "x", "--temperature", "nan"), "got temperature = nan, expected a number"),
        (("generate", "--prompt", "x", "--temperature", "1e-39"), "expected at least 1e-06, or 0 for greedy search"),
        (("chat", "chatty", "--temperature", "1e-300"), "expected at least 1e-06, or 0 for greedy search"),
        (("compare", "tiny-gpt2", "--sample", "temperature=1e-45"), "at least 1e-06; leave sample out for greedy"),
        (("generate", "--prompt", "x", "--seed", "-1"), "got seed = -1, expected at least 0"),
        (("generate", "--prompt", "a\udcff"), r"got prompt = a\udcff, which is not UTF-8"),
        (("evaluate", "tiny-gpt2", "--text", "/dev/zero"), "gives more than 16,777,216 bytes"),
        (("trace", "kernels", "made.json", "--csv", "--output", "."), "which is a folder; name a file in it"),
        (("compare", f"gpt2{ESCAPE}"), r"\x1b]0;title\x07\x1b[2J"),
        (("stages", f"{ESCAPE}.json"), r"\x1b]0;title\x07\x1b[2J"),
        (("diff", f"{ESCAPE}.json", "b"), r"\x1b]0;title\x07\x1b[2J"),
        (("run", f"{ESCAPE}.ipynb"), r"\x1b]0;title\x07\x1b[2J"),
        (("nothing",), "No such command 'nothing'; labkit --help shows what it takes"),
        (("plan-batch", "tiny-gpt2", "--memory-gb", "1", "--precision", "int3"), "unknown precision 'int3'"),
        (("bench-methods", "tiny-gpt2", "--cycles", "0"), "got rounds = 0, expected at least 1"),
        (("generate", "--new_tokens", "0", "--prompt", "x"), "got new = 0, expected at least 1"),
    ],
    ids=lambda value: " ".join(value).encode("ascii", "replace").decode()[:60] if isinstance(value, tuple) else "",
)
def test_a_request_that_cannot_be_served_ends_with_one_line(
    line: tuple[str, ...], message: str, labkit: Labkit, place: Path
) -> None:
    (place / "runs").mkdir()
    before = sorted(place.rglob("*"))
    code, output, errors = labkit(*line)
    check(line, (code, output, errors))
    assert code == 2
    assert message in errors
    assert len(errors.splitlines()) == 1
    assert sorted(place.rglob("*")) == before


NAMES = (("--dtype", "--new"), ("--precision", "--new-tokens"), ("--precisions", "--new_tokens"))


def test_former_names_of_options_are_in_no_help_and_mean_the_present_ones(labkit: Labkit) -> None:
    _, output, _ = labkit("plan-batch", "--help")
    assert "--dtype" in output
    assert "--precision" not in output
    arguments = ("plan-batch", "tiny-gpt2", "--memory-gb", "1", "--disk-gb-s", "1", "--gflops", "9", "--json")
    outputs = [labkit(*arguments, option, "int8-32", new, "9")[1] for option, new in NAMES]
    assert "int8-32" in outputs[0]
    assert len({re.sub(r'"created": "[^"]*"', "", plan) for plan in outputs}) == 1


def test_lines_of_a_chat_that_are_no_text_are_refused_and_the_conversation_stays(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(b"one\nt\xffwo\nthree\n"), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", stdin)
    code, _, errors = command_line(monkeypatch, capsys)("chat", "chatty", "--new", "2")
    assert code == 0
    assert r"t\udcffwo, which is not UTF-8" in errors
    assert errors.count("context ") == 2


def test_a_template_that_fails_is_one_line_and_the_conversation_stays(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    template = "{% if messages[-1]['content'] == 'bad' %}{{ 1 // 0 }}{% endif %}{{ messages[-1]['content'] }}"
    (place / "chatty" / "chat_template.jinja").write_text(template)
    monkeypatch.setattr(sys, "stdin", io.StringIO("good\nbad\ngood\n"))
    code, _, errors = command_line(monkeypatch, capsys)("chat", "chatty", "--new", "2")
    assert code == 0
    assert errors.count("context ") == 2
    assert "by zero" in errors


@pytest.mark.parametrize(
    ("line", "unbuffered"),
    paired(
        {
            "models": ("models",),
            "list": ("notebooks", "list"),
            "help": ("--help",),
            "version": ("--version",),
            "none": ("compare",),
        },
        {"buffered": "", "unbuffered": "1"},
    ),
)
def test_a_full_disk_under_stdout_or_stderr_is_no_traceback(
    line: tuple[str, ...], unbuffered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A buffer keeps the unwritten output, and Python tries to write it again at exit."""
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    with open("/dev/full", "w") as full:
        process = subprocess.run([*LABKIT, *line], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        process_of_both = subprocess.run([*LABKIT, *line], stdout=full, stderr=full, check=False)
    if line == ("compare",):
        assert (process.returncode, process_of_both.returncode) == (2, 2)
        return
    assert (process.returncode, process_of_both.returncode) == (1, 1)
    (message,) = process.stderr.splitlines()
    assert message.startswith("error: the output cannot be written: No space left on device")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (("models",), ("tiny-gpt2",)),
        (("trace", "kernels", "made.json"), ("name", "count", "k")),
        (("compare", "--help"), ("--baseline", "--wait-quiet")),
        (("trace", "--help"), ("kernels", "summary")),
    ],
)
def test_a_narrow_terminal_gets_whole_names(line: tuple[str, ...], words: tuple[str, ...], place: Path) -> None:
    environment = os.environ | {"COLUMNS": "20"}
    process = subprocess.run([*LABKIT, *line], env=environment, capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr) == (0, "")
    assert set(words) <= set(process.stdout.split())


@sweep
@pytest.mark.parametrize("delay_s", [0.3, 0.6])
def test_ctrl_c_in_the_first_second_is_no_traceback(delay_s: float, place: Path) -> None:
    """The signal comes after the start of Python itself, which is not labkit's."""
    announce = "import sys; sys.stdout.write('.'); sys.stdout.flush(); from labkit.cli.main import main; main()"
    arguments = [sys.executable, "-P", "-c", announce, "generate", "tiny-gpt2", "--prompt", "x" * 99, "--new", "1500"]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.read(1)
    time.sleep(delay_s)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors


COMMANDS = sorted(set(app.HOMES) - {"doctor"})  # the doctor starts programs of the machine


def test_the_lines_are_of_commands() -> None:
    assert set(LINES) <= set(COMMANDS)


@st.composite
def lines(draw: st.DrawFn) -> tuple[str, ...]:
    """Draws a command line with one to three words replaced, added or left out."""
    command = draw(st.sampled_from(COMMANDS))
    words = list(LINES.get(command, ()))
    options = [name for parameter in app.Commands()[command].params for name in parameter.opts if name[0] == "-"]
    for _ in range(draw(st.integers(1, 3))):
        change = draw(st.sampled_from(("value", "option", "less", "more")))
        position = draw(st.integers(0, len(words)))
        value = draw(st.sampled_from(VALUES) | st.text(max_size=9).filter(lambda text: "\0" not in text))
        if change == "value" and position < len(words):
            words[position] = value
        elif change == "option" and options:
            words[position:position] = [draw(st.sampled_from(options)), value]
        elif change == "less" and position < len(words):
            del words[position]
        else:
            words.insert(position, value)
    return (command, *words)


@pytest.fixture
def limit() -> Iterator[Callable[[float], None]]:
    """Returns a function that limits the processor time in seconds (0: no limit); a busy machine does not use it up."""

    def late(*_: object) -> None:
        raise TimeoutError("a command took more than 10 s of processor")

    before = signal.signal(signal.SIGPROF, late)
    yield lambda seconds: signal.setitimer(signal.ITIMER_PROF, seconds) and None
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, before)


@pytest.mark.sweep
@pytest.mark.timeout(3600)
def test_no_command_line_ends_in_a_traceback(
    labkit: Labkit, limit: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("labkit.conversation.speed.floor_share", lambda *rest: None)
    for warm in ("generate", "chat", "kernels"):  # loads their libraries and compiles their kernels first
        labkit(warm, *LINES[warm])
    seen, wrong = set(), []

    @settings(
        max_examples=400,
        derandomize=True,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(lines())
    def sweep(line: tuple[str, ...]) -> None:
        seen.add(line)
        limit(10)
        try:
            check(line, labkit(*line))
        except Exception as error:  # noqa: BLE001  every error is collected, and none ends the sweep
            wrong.append((line, repr(error)[-300:]))
        finally:
            limit(0)

    sweep()
    assert len(seen) >= 300
    assert wrong == []
