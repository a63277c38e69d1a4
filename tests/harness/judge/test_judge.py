"""The judge of foreign code: honest variants pass, and every cheat is caught, with its reason."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from helpers.judge import softmax_submissions as submissions
from helpers.judge.invented_cheats import INVENTED
from helpers.sweeps import sweep

from labkit.harness.judge import judged_process
from labkit.harness.judge.arrays import Input, JudgedCall, Result
from labkit.harness.judge.judge import Finding, Question, Speed, Task, check, race
from labkit.harness.judge.judged_process import Submission
from labkit.kernels.build import compiler

CALLS = 64
CHEATS = submissions.CHEATS | INVENTED
BODIES = submissions.HONEST | {name: body for name, (body, _) in CHEATS.items()}


def compiled(folder: Path, name: str, text: str) -> Path:
    (folder / f"{name}.cpp").write_text(text)
    library = folder / f"{name}.so"
    flags = ("-O2", "-march=native", "-fopenmp", "-shared", "-fPIC", "-w")
    subprocess.run([*compiler(), *flags, str(folder / f"{name}.cpp"), "-o", str(library)], check=True)
    return library


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("submissions"), "softmax", submissions.source(BODIES))


def submission(library: Path, name: str, threads: int = 2) -> Submission:
    return Submission(library, f"softmax_{list(BODIES).index(name)}", kinds="ppii", threads=threads)


def question(values: np.ndarray) -> Question:
    rows, columns = values.shape
    exact = values.astype(np.float64)
    exponentials = np.exp(exact - exact.max(axis=-1, keepdims=True))
    call = JudgedCall((Input(values), Result((rows, columns)), rows, columns))
    mistakes = {
        "these are the exponentials, before they are divided by their sum": [exponentials],
        "the sum is over all rows": [exponentials / exponentials.sum()],
    }
    return Question(call, [exponentials / exponentials.sum(axis=-1, keepdims=True)], mistakes)


def draw(rng: np.random.Generator) -> Sequence[Question]:
    """Rows of many widths, some with one large value, so that exponentials overflow."""
    questions = []
    for _ in range(CALLS):
        rows, columns = (int(size) for size in rng.integers((1, 2), (9, 60)))
        values = (3 * rng.standard_normal((rows, columns)) + 10 * rng.standard_normal()).astype(np.float32)
        values[rng.integers(rows), rng.integers(columns)] += rng.choice([0.0, 300.0])
        questions.append(question(values))
    return [*questions, question(rng.standard_normal((4, 48)).astype(np.float32))]


def task(library: Path) -> Task:
    return Task(draw, submission(library, "plain"))


@pytest.mark.parametrize("name", submissions.HONEST)
def test_honest_variants_are_right(library: Path, name: str) -> None:
    finding = check(submission(library, name), task(library), np.random.default_rng(len(name)))
    assert finding.right, finding.problem


@sweep
@pytest.mark.parametrize("name", submissions.HONEST)
def test_honest_variants_are_right_in_200_runs(library: Path, name: str) -> None:
    for seed in range(200):
        finding = check(submission(library, name), task(library), np.random.default_rng(seed))
        assert finding.right, finding.problem


@pytest.mark.parametrize("name", CHEATS)
def test_every_cheat_is_caught(library: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a check, or by the race, whose second round only some cheats know."""
    monkeypatch.setattr(judged_process, "ROUND_S", 1.0)
    rng = np.random.default_rng(1)
    finding: Finding | Speed = check(submission(library, name), task(library), rng)
    if isinstance(finding, Finding) and finding.right:
        finding = race(submission(library, name), task(library), rng, turns=2)
    assert isinstance(finding, Finding)
    assert any(reason in finding.problem for reason in CHEATS[name][1].split("|")), finding.problem


@pytest.mark.parametrize(("read_s", "impossible"), [([10.0, 10.0, 10.0], True), ([10.0, 1e-6, 10.0], False)])
def test_a_kernel_is_too_fast_only_for_the_fastest_read(
    library: Path, read_s: Sequence[float], impossible: bool
) -> None:
    """A read that other work slowed down refuses no honest kernel."""
    reads = iter(read_s)
    limited = Task(draw, submission(library, "plain"), reader=lambda arrays: next(reads))
    speed = race(submission(library, "plain"), limited, np.random.default_rng(0), turns=len(read_s))
    assert isinstance(speed, Finding) == impossible
    assert isinstance(speed, Speed) or "impossible" in speed.problem


@pytest.mark.parametrize("name", submissions.AT_LOAD)
def test_code_that_runs_at_load_gains_nothing(
    library: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judged_process, "LOAD_S", 1.0)
    code, reason = submissions.AT_LOAD[name]
    early = f"static void __attribute__((constructor)) early() {{ {code} }}"
    bodies = {"plain": submissions.PLAIN}
    at_load = compiled(tmp_path, "at_load", submissions.source(bodies) + early)
    finding = check(Submission(at_load, "softmax_0", kinds="ppii"), task(library), np.random.default_rng(0))
    assert reason in finding.problem, finding.problem
