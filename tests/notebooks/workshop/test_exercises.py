"""Every solution passes, for several learners, and every wrong answer fails for its own reason."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from helpers.sweeps import sweep, swept

from labkit.notebooks.workshop.cells import exercise
from labkit.notebooks.workshop.checks import find_the_bug, free_batch, limit_by_hand, read_a_timeline
from labkit.notebooks.workshop.exercises import Report, exercises, find_exercise
from labkit.notebooks.workshop.learner import Learner
from labkit.nsys import read, stage_table
from labkit.system.carried import carried

IN_NUMBERS = ("limit-by-hand", "read-a-timeline", "find-the-bug", "free-batch")
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


def changed(text: str, changes: Mapping[str, str]) -> str:
    """The text after all replacements, each of which finds something to replace."""
    for before, after in changes.items():
        assert before in text
        text = text.replace(before, after)
    return text


@pytest.mark.parametrize("name", [name for name in exercises() if name not in TIMED])
@pytest.mark.parametrize("learner", swept(["Ada", "Grace"], ["Ada"]))
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


def test_a_cell_shows_names_as_code_and_all_else_as_text(tmp_path: Path) -> None:
    task = exercise("online-softmax", tmp_path)
    work = tmp_path / task.exercise.folder.name / "online_softmax.cpp"
    work.write_text("#error `good_name` `<b>bad</b>`\n")
    shown = task.check(seed=0).data
    assert "`good_name`" in shown
    assert r"\`\<b>bad" in shown


@pytest.mark.parametrize("name", exercises())
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    yours, exercise = Learner(tmp_path), find_exercise(name)
    work = yours.start(exercise)
    (work / exercise.files[0]).unlink()
    assert f"{exercise.files[0]} is missing" in str(yours.check(exercise))


def expected(name: str, learner: str) -> Mapping[str, tuple[float, Mapping[float, str]]]:
    """The right numbers of a learner, and the mistakes that give others."""
    if name == "find-the-bug":
        return find_the_bug.expected()
    module = {"limit-by-hand": limit_by_hand, "read-a-timeline": read_a_timeline, "free-batch": free_batch}[name]
    return module.expected(find_exercise(name).parameters(learner))


def wrong_numbers() -> list[tuple[str, str, float, str]]:
    return [
        (name, answer, number, sentence)
        for name in IN_NUMBERS
        for answer, (_, mistakes) in expected(name, "Ada").items()
        for number, sentence in mistakes.items()
    ]


@pytest.mark.parametrize(("name", "answer", "number", "sentence"), wrong_numbers())
def test_every_mistake_in_a_number_is_recognised(
    tmp_path: Path, name: str, answer: str, number: float, sentence: str
) -> None:
    report = checked(tmp_path, name, {"answers.toml": f"{answer} = {number!r}\n"})
    (remark,) = [remark for remark in report.remarks if remark.text.startswith(f"{answer}:")]
    assert not remark.right
    assert sentence in remark.text


def test_the_captures_have_what_the_exercise_asks_for(tmp_path: Path) -> None:
    """The learner's copies give these numbers, although other functions read them than the check's."""
    exercise = find_exercise("read-a-timeline")
    work, of = Learner(tmp_path).start(exercise, "Ada"), exercise.parameters("Ada")
    right = {name: number for name, (number, _) in read_a_timeline.expected(of).items()}
    ranges = {name: read(work / f"{name}.sqlite").ranges for name in ("vanilla", "fused")}
    for name, frame in ranges.items():
        steps = frame[frame["name"] == "decode/step"]
        lasts_ms = (steps["end_ns"] - steps["start_ns"]).iloc[of["step"] - 1] / 1e6
        assert lasts_ms == pytest.approx(right[f"{name}_ms"])
    stages = ranges["fused"][ranges["fused"]["name"] == f"decode/layer.{of['layer']}/mlp"]
    lasts_us = (stages["end_ns"] - stages["start_ns"]).iloc[of["step"] - 1] / 1e3
    assert lasts_us == pytest.approx(right["mlp_us"])
    of_gpu = stage_table(read(work / "gpu.sqlite"), ("phase", "stage")).frame.set_index(["phase", "stage"])
    assert 100 * of_gpu.loc[("decode", "idle"), "share"] == pytest.approx(right["gpu_idle_percent"])


def test_each_learner_finds_each_fault_in_a_file_that_does_not_tell_it(tmp_path: Path) -> None:
    exercise, orders = find_exercise("find-the-bug"), set()
    for number, learner in enumerate(("Ada", "Grace", "Emmy", "Hypatia", "Sophie", "Rosalind")):
        faults = find_the_bug.faults(exercise.parameters(learner))
        work = Learner(tmp_path / str(number)).start(exercise, learner)
        for name, fault in faults.items():
            (copy,) = [path for path in work.iterdir() if path.name.startswith(f"{name}.")]
            assert copy.read_bytes() == (carried("profiles/captures") / find_the_bug.CAPTURES[fault]).read_bytes()
        orders.add(tuple(faults.values()))
    assert len(orders) > 2


def test_the_planted_faults_are_as_large_as_they_were_planted() -> None:
    captures = carried("profiles/captures")

    def stages(name: str, by: tuple[str, ...]) -> Any:
        frame = stage_table(read(captures / name), by).frame
        return frame[frame["phase"] == "decode"].set_index([column for column in by if column != "phase"])

    by_rank = stages("straggling-rank.sqlite", ("phase", "stage", "rank"))["median_ms"]
    assert by_rank["mlp", 1] - by_rank["mlp", 0] == pytest.approx(0.4, rel=0.2)
    healthy, stalled = (
        stages(name, ("phase", "stage"))["step_ms"]["idle"]
        for name in ("gpt2-fused-h100.sqlite", "stalling-host.sqlite")
    )
    assert stalled - healthy == pytest.approx(0.9, rel=0.2)
    misplaced = stages("wrong-stage.sqlite", ("phase", "stage"))["median_ms"]
    assert misplaced["attn_out"] < 0.05 * misplaced["attention"]
    of_layers = stages("hidden-copy.json.gz", ("phase", "layer", "stage"))["median_ms"].xs("mlp", level="stage")
    assert of_layers.idxmax() == find_the_bug.LAYER
    assert of_layers.max() > 4 * of_layers.median()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("weights_mb =\n", "cannot be read"),
        ("weights_mb = many\n", "cannot be read: `weights_mb = many`, line 1: a word stands in quotes"),
        ("weights_mb = 3,5\n", "cannot be read: `weights_mb = 3,5`, line 1: "),
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
    report = checked(tmp_path, "online-softmax", {"online_softmax.cpp": changed(SOFTMAX, changes)})
    assert not report.passed
    assert any(reason in str(report) for reason in reasons.split("|")), str(report)


@pytest.mark.parametrize("name", IN_NUMBERS)
def test_no_mistake_is_close_to_the_right_number(name: str) -> None:
    """Else a wrong number would pass."""
    for learner in range(200 if name == "limit-by-hand" else 20):
        for answer, (right, mistakes) in expected(name, f"learner {learner}").items():
            for number, sentence in mistakes.items():
                assert abs(number - right) > 0.02 * abs(right), (answer, sentence, learner)


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
    assert "only 0 of 96 checks were made" in str(report)


CHECKERS = (find_exercise("fool-the-checkers").solution / "checkers.py").read_text()
CHEATS = (find_exercise("fool-the-checkers").solution / "cheats.py").read_text()
HOLES: dict[str, tuple[Mapping[str, str], str]] = {
    "the first call counts": ({"zip(outs, rights, strict=True)": "zip(outs[:1], rights[:1])"}, "4 believes cheat_4"),
    "the first half counts": ({"zip(outs, rights, strict=True)": "zip(outs[:5], rights[:5])"}, "4 believes another"),
    "both ends count": ({"zip(outs, rights, strict=True)": "zip(outs[::9], rights[::9])"}, "4 believes another"),
    "no copy": ({"zip(copies, outs": "zip(inputs, outs", "unchanged and close": "close"}, "2 believes another"),
    "a large tolerance": ({"rtol=1e-4, atol=1e-12": "atol=1e-2"}, "1 believes another"),
    "no tolerance": ({"rtol=1e-4, atol=1e-12": "rtol=0, atol=0"}, "1 refuses a right kernel"),
    "the reference in the result": ({"np.full_like(x, np.nan)": "softmax(x).astype(x.dtype)"}, "3 believes cheat_3"),
    "misspelt": ({"def checker_2": "def cheker_2"}, "checker 2: checkers.py lacks the function checker_2"),
    "no Python": ({"unchanged and close": "unchanged close"}, "checkers.py, line 23: SyntaxError: "),
    "an error": ({"unchanged and close": "unchanged + missing"}, "checkers.py, line 23: NameError: "),
    "endless": ({'    """Large scores."""\n': "    while True: pass\n"}, "checker 3: it did not end within 1 s"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOLES)
def test_mended_checkers_with_a_hole_are_told_which(tmp_path: Path, name: str) -> None:
    changes, reason = HOLES[name]
    report = checked(tmp_path, "fool-the-checkers", {"checkers.py": changed(CHECKERS, changes), "cheats.py": CHEATS})
    assert not report.passed
    assert reason in str(report), str(report)


BENCHMARK = (find_exercise("honest-benchmark").solution / "benchmark.py").read_text()
DISHONEST: dict[str, tuple[Mapping[str, str], str]] = {
    "one prompt": ({"(machine, engine, turn)": "(machine, engine, 7)"}, "not yet: engines that remember prompts"),
    "the tokens that were asked for": ({"/ made": "/ TOKENS"}, "not yet: an engine that ends some texts early"),
    "one turn": ({"TOKENS = 21, 64": "TOKENS = 1, 1"}, "not yet: a machine that becomes slower"),
    "no engine of this name": ({'"b"):\n': '"c"):\n'}, "on every machine: line 28 asked for"),
    "an endless benchmark": ({"21, 64": "9999, 64"}, "more time than the machine's ten minutes"),
    "many short texts": ({"21, 64": "9999, 1"}, "more than 20,000 calls"),
    "no time": ({"made = machine.wait(engine)": "made = TOKENS"}, "the clock ticks once in a millisecond"),
    "text": ({"return median(ratios)": "return 'twice'"}, "on every machine: it returned 'twice', expected a number"),
}  # fmt: skip


@pytest.mark.parametrize("name", DISHONEST)
def test_dishonest_benchmarks_fail_for_their_own_reason(tmp_path: Path, name: str) -> None:
    changes, reason = DISHONEST[name]
    report = checked(tmp_path, "honest-benchmark", {"benchmark.py": changed(BENCHMARK, changes)})
    assert not report.passed
    assert reason in str(report), str(report)
