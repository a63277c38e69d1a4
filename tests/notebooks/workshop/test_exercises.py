"""Every solution passes, for several learners, and every wrong answer fails for its own reason."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from helpers.sweeps import sweep

from labkit.notebooks.workshop.checks import limit_by_hand
from labkit.notebooks.workshop.exercises import Report, exercises, find_exercise
from labkit.notebooks.workshop.learner import Learner

TIMED = ("gemv", "fuse-a-region", "predict-then-measure")  # whose checks time something


def checked(folder: Path, name: str, files: Mapping[str, str], learner: str = "Ada") -> Report:
    """The report on an exercise with these files in place of the first ones."""
    yours, exercise = Learner(folder), find_exercise(name)
    work = yours.start(exercise, learner)
    for file, text in files.items():
        (work / file).write_text(text)
    return yours.check(exercise, seed=len(learner))


def solution(folder: Path, name: str, learner: str = "Ada") -> dict[str, str]:
    yours, exercise = Learner(folder / "solving"), find_exercise(name)
    yours.start(exercise, learner)
    return {path.name: path.read_text() for path in yours.solve(exercise).iterdir()}


@pytest.mark.parametrize("name", [name for name in exercises() if name not in TIMED])
@pytest.mark.parametrize("learner", ["Ada", "Grace"])
def test_a_solution_passes(tmp_path: Path, name: str, learner: str) -> None:
    report = checked(tmp_path, name, solution(tmp_path, name, learner), learner)
    assert report.passed, str(report)


@sweep
@pytest.mark.parametrize("name", ["gemv", "fuse-a-region"])
def test_a_timed_kernel_is_right(tmp_path: Path, name: str) -> None:
    """Its speed belongs to a quiet machine."""
    report = checked(tmp_path, name, solution(tmp_path, name))
    right, speed = report.remarks
    assert right.right, right.text
    assert "the goal is" in speed.text


@sweep
def test_predictions_stand_next_to_the_measurement(tmp_path: Path) -> None:
    name = "predict-then-measure"
    report = checked(tmp_path, name, solution(tmp_path, name))
    assert [remark.text.partition(":")[0] for remark in report.remarks] == ["float32_ms", "int8_ms", "times_faster"]
    assert all("you predicted" in remark.text for remark in report.remarks)


@pytest.mark.parametrize("name", [name for name in exercises() if name not in TIMED])
def test_the_first_files_do_not_pass(tmp_path: Path, name: str) -> None:
    assert not checked(tmp_path, name, {}).passed


@pytest.mark.parametrize("name", exercises())
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    yours, exercise = Learner(tmp_path), find_exercise(name)
    work = yours.start(exercise)
    (work / exercise.files[0]).unlink()
    assert f"{exercise.files[0]} is missing" in str(yours.check(exercise))


def wrong_numbers() -> list[tuple[str, float, str]]:
    parameters = find_exercise("limit-by-hand").parameters("Ada")
    return [
        (answer, number, sentence)
        for answer, (_, mistakes) in limit_by_hand.expected(parameters).items()
        for number, sentence in mistakes.items()
    ]


@pytest.mark.parametrize(("answer", "number", "sentence"), wrong_numbers())
def test_every_mistake_in_the_limit_is_recognised(tmp_path: Path, answer: str, number: float, sentence: str) -> None:
    report = checked(tmp_path, "limit-by-hand", {"answers.toml": f"{answer} = {number!r}\n"})
    (remark,) = [remark for remark in report.remarks if remark.text.startswith(f"{answer}:")]
    assert not remark.right
    assert sentence in remark.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("weights_mb =\n", "cannot be read"),
        ("\xff", "cannot be read"),
        ("weight_mb = 1\n", "weight_mb, which is no answer"),
        ('weights_mb = "many"\n', "expected a number"),
        ("weights_mb = [1]\n", "expected a number"),
        ("weights_mb = nan\n", "expected a finite number"),
    ],
)
def test_answers_that_are_none_get_a_sentence(tmp_path: Path, text: str, message: str) -> None:
    assert message in str(checked(tmp_path, "limit-by-hand", {"answers.toml": text}))


SOFTMAX = (find_exercise("online-softmax").solution / "online_softmax.cpp").read_text()
WRONG_SOFTMAX: dict[str, tuple[Mapping[str, str], str]] = {
    "nothing is scaled": ({"sum *= scale;": "", "added[c] *= scale": "(void)scale"}, "relative to its own maximum"),
    "only the sum is scaled": ({"added[c] *= scale": "(void)scale"}, "expected"),
    "the state is divided": ({"out[c] = added[c] / sum": "added[c] /= sum, out[c] = added[c]"}, "expected"),
    "no first block": ({"if (first) most = -INFINITY;": "(void)first;"}, "not written, or computed"),
    "a maximum of zero": ({"most = -INFINITY": "most = 0"}, "not written, or computed|expected"),
    "blocks alone": (
        {"if (first) most": "sum = 0; for (int64_t c = 0; c < width; ++c) added[c] = 0; most"}, "the last block alone"
    ),
    "does not compile": ({"std::exp": "std::expp"}, "the compiler refused it"),
    "another name": ({"void attend": "void attended"}, "attend"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_SOFTMAX)
def test_wrong_kernels_fail_for_their_own_reason(tmp_path: Path, name: str) -> None:
    changes, reasons = WRONG_SOFTMAX[name]
    text = SOFTMAX
    for before, after in changes.items():
        assert before in text
        text = text.replace(before, after)
    report = checked(tmp_path, "online-softmax", {"online_softmax.cpp": text})
    assert not report.passed
    assert any(reason in str(report) for reason in reasons.split("|")), str(report)


def any_parameters() -> list[Any]:
    return [find_exercise("limit-by-hand").parameters(f"learner {number}") for number in range(200)]


def test_no_mistake_in_the_limit_is_close_to_the_right_answer() -> None:
    """Else a wrong number would pass."""
    for parameters in any_parameters():
        for answer, (right, mistakes) in limit_by_hand.expected(parameters).items():
            for number, sentence in mistakes.items():
                assert abs(number / right - 1) > 0.02, (answer, sentence, parameters)


def test_a_cheat_that_ends_the_conversation_passes_nothing(tmp_path: Path) -> None:
    """It writes the driver's last message into every descriptor, before any check was made."""
    ends = """
import os
for file in range(3, 1024):
    try:
        os.write(file, b'{"result": true}\\n')
    except OSError:
        pass
"""
    report = checked(tmp_path, "fool-the-checkers", {"cheats.py": ends})
    assert not report.passed
    assert "only 0 of 87 checks were made" in str(report)
