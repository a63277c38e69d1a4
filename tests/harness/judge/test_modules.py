"""Submissions in Python: what they compute, what they may not reach, and conversations with the judge."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from labkit.harness.judge import judged_process
from labkit.harness.judge.arrays import BFLOAT16, Input, JudgedCall, Result
from labkit.harness.judge.judge import answers, conversation
from labkit.harness.judge.judged_process import Submission, SubmissionError, site_packages, with_numpy

TO_ALL_FILES = """
    import os
    for file in range(3, 1024):
        try:
            os.write(file, {})
        except OSError:
            pass
"""
VALUES = np.arange(6, dtype=np.float32).reshape(2, 3)


def doubled(folder: Path, body: str) -> list[np.ndarray]:
    """The result of a function `double(x, y)` with this body, on two calls."""
    (folder / "double.py").write_text(f"import numpy as np\n\ndef double(x, y):\n{body}")
    calls = [JudgedCall((Input(values), Result(values.shape))) for values in (VALUES, -VALUES)]
    return [result for (result,) in answers(with_numpy(folder / "double.py", "double"), calls)]


def test_a_function_in_python_writes_its_results(tmp_path: Path) -> None:
    first, second = doubled(tmp_path, "    y[:] = 2 * x\n")
    assert np.array_equal(first, 2 * VALUES)
    assert np.array_equal(second, -2 * VALUES)


def test_what_is_not_written_is_nan(tmp_path: Path) -> None:
    first, _ = doubled(tmp_path, "    y[0] = 2 * x[0]\n")
    assert np.isnan(first[1]).all()
    assert not np.isnan(first[0]).any()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("    x[:] = 0\n", "read-only"),
        ("    x.flags.writeable = True; x[:] = 0\n", "outside of its arguments"),
        ("    raise KeyError('mine')\n", "KeyError: 'mine'"),
        ("    import labkit\n", "No module named 'labkit'|PermissionError|Permission denied"),
        ("    open('/etc/passwd').read()\n", "Permission denied"),
        ("    open('/tmp/labkit-cheat', 'w')\n", "Permission denied"),
        (f"    open({str(Path(__file__))!r}).read()\n", "Permission denied"),
        ("    import os; os.fork()\n", "forbidden"),
        ("    import os; os.system('true')\n", "forbidden"),
        ("    import socket; socket.socket()\n", "forbidden"),
        ("    import os, signal; os.kill(os.getppid(), signal.SIGKILL)\n", "forbidden"),
        ("    import os; os.unlink(__file__)\n", "Permission denied"),
        ("    while True: pass\n", "did not end in time"),
        ("    z = np.ones(1 << 30)\n", "Unable to allocate|MemoryError"),
        ("    import os; os._exit(0)\n", "exit code 0"),
        ("    import sys; sys.exit(3)\n", "SystemExit: 3"),
        (
            "    print('x' * (1 << 28)); import sys; sys.stderr.write('y' * (1 << 24)); y[:] = 1 / 0\n",
            "error|ended|did not end in time",
        ),
    ],
)
def test_what_a_module_may_not_do_ends_it(
    tmp_path: Path, body: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judged_process, "ROUND_S", 2.0)
    with pytest.raises(SubmissionError) as error:
        doubled(tmp_path, body)
    assert any(part in str(error.value) for part in reason.split("|")), str(error.value)
    assert (tmp_path / "double.py").exists()
    assert not Path("/tmp/labkit-cheat").exists()


def test_nothing_of_the_judge_is_in_the_process(tmp_path: Path) -> None:
    """Neither in its variables nor in its modules, files and parents on the stack."""
    body = """
    import gc, sys
    names = {name for name in sys.modules if name.startswith("labkit")}
    arrays = [thing for thing in gc.get_objects() if isinstance(thing, np.ndarray) and thing.size > 6]
    y[:] = len(names) + len([of for of in arrays if of.dtype == np.float32])
"""
    first, second = doubled(tmp_path, body)
    assert not first.any()
    assert not second.any()


def test_bfloat16_goes_in_and_out_as_words(tmp_path: Path) -> None:
    (tmp_path / "same.py").write_text("def same(x, y):\n    y[:] = x\n")
    words = (VALUES.view(np.uint32) >> 16).astype(np.uint16)
    submission = Submission(tmp_path / "same.py", "same", "python", imports=("torch",), readable=site_packages())
    ((result,),) = answers(submission, [JudgedCall((Input(words, BFLOAT16), Result(VALUES.shape, BFLOAT16)))])
    assert np.array_equal(result, VALUES)


def talk(folder: Path, body: str, answer: Any) -> Any:
    (folder / "talk.py").write_text(f"def talk(judge):\n{body}")
    return conversation(Submission(folder / "talk.py", "talk", "conversation"), answer)


def test_a_conversation_ends_with_a_result(tmp_path: Path) -> None:
    body = "    return [judge.double(number) for number in range(300)]\n"
    assert talk(tmp_path, body, lambda name, number: 2 * number) == [2 * number for number in range(300)]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("    return judge.nothing()\n", "asked for something that there is not"),
        ("    while True: judge.double(1)\n", "asked for something that there is not: enough"),
        ("    return object()\n", "TypeError"),
        (TO_ALL_FILES.format("b'42\\n'"), "only the judge"),
        (TO_ALL_FILES.format("b'x' * 100000"), "without an end|only the judge"),
        ("    import os; os.closerange(3, 1024)\n    while True: pass\n", "closed a file|exit code|Bad file"),
        ("    import time; time.sleep(60)\n", "did not end in time"),
    ],
)  # fmt: skip
def test_what_a_conversation_may_not_do_ends_it(
    tmp_path: Path, body: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judged_process, "ROUND_S", 2.0)
    asked = []

    def answer(name: str, number: int) -> int:
        asked.append(number)
        if len(asked) > 50:
            raise ValueError("enough")
        return 2 * number

    with pytest.raises(SubmissionError) as error:
        talk(tmp_path, body, answer)
    assert any(part in str(error.value) for part in reason.split("|")), str(error.value)
