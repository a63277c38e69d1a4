"""Exercise: a benchmark that is right on machines with the habits of real ones.

The machine is simulated here. The learner's code asks for it from a process of its own, so it learns only what a
benchmark can see.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from labkit.harness.judge.judge import conversation
from labkit.harness.judge.judged_process import Submission, SubmissionError
from labkit.notebooks.workshop.exercises import Attempt, Remark, Report

FILE = "benchmark.py"
TOLERANCE = 0.03
MOST_TOKENS, MOST_S, MOST_QUESTIONS = 64, 600.0, 20_000
TICK_S = 1e-3


@dataclass(frozen=True)
class Habits:
    """What a machine and its engines do besides generating."""

    compile_s: float = 0.0  # in an engine's first generation
    remembers: bool = False  # whether an engine answers a known prompt at once
    ends_early: bool = False  # whether engine b makes half of the tokens of some texts
    slows: float = 0.0  # by this fraction in each second, at most to half of the speed
    disturbed: float = 0.0  # share of generations that take ten times as long


PLAIN = Habits()
MACHINES: dict[str, Callable[[Habits], Habits]] = {
    "a quiet machine": lambda habits: PLAIN,
    "engines that compile something when they first run": lambda habits: replace(PLAIN, compile_s=habits.compile_s),
    "engines that remember prompts": lambda habits: replace(PLAIN, remembers=True),
    "an engine that ends some texts early": lambda habits: replace(PLAIN, ends_early=True),
    "a machine that becomes slower while it gets warm": lambda habits: replace(PLAIN, slows=habits.slows),
    "a machine that other programs disturb": lambda habits: replace(PLAIN, disturbed=habits.disturbed),
    "a machine with all of these habits": lambda habits: habits,
}


@dataclass
class SimulatedMachine:
    """A simulated computer with two engines. Its methods `clock`, `start` and `wait` are what a benchmark may ask."""

    token_s: dict[str, float]  # of each engine
    habits: Habits
    rng: np.random.Generator
    now_s: float = 0.0
    questions: int = 0
    _until_s: dict[str, float] = field(default_factory=dict)  # the end of each engine's generation
    _made: dict[str, int] = field(default_factory=dict)
    _known: dict[str, set[int]] = field(default_factory=dict)  # prompts that each engine has seen

    @property
    def truth(self) -> float:
        return self.token_s["a"] / self.token_s["b"]

    def answer(self, name: str, *arguments: Any) -> Any:
        """The answer to a question of the benchmark."""
        self.questions += 1
        if self.now_s > MOST_S:
            raise ValueError("more time than the machine's ten minutes")
        if self.questions > MOST_QUESTIONS:
            raise ValueError(
                f"more than {MOST_QUESTIONS:,} calls of the machine's functions; are the texts very short?"
            )
        if name not in ("clock", "start", "wait"):
            raise ValueError(f"machine.{name}; it has clock, start and wait")
        return getattr(self, name)(*arguments)

    def clock(self) -> float:
        self.now_s += 1e-6
        return round(self.now_s // TICK_S * TICK_S, 6)

    def start(self, engine: str, prompt: int, tokens: int) -> None:
        if engine not in self.token_s:
            raise ValueError(f"the engine {engine!r}; there are 'a' and 'b'")
        if type(prompt) is not int or type(tokens) is not int or not 1 <= tokens <= MOST_TOKENS:
            raise ValueError(
                f"a prompt of {prompt!r} and {tokens!r} tokens; a prompt is a whole number, and tokens are 1 to 64"
            )
        known = self._known.setdefault(engine, set())
        made = tokens // 2 + 1 if self.habits.ends_early and engine == "b" and self.rng.random() < 0.5 else tokens
        slower = 1 / max(0.5, 1 - self.habits.slows * self.now_s)
        seconds = made * self.token_s[engine] * slower * self.rng.normal(1, 0.004)
        if self.rng.random() < self.habits.disturbed:
            seconds *= 10
        if self.habits.remembers and prompt in known:
            seconds = 1e-4
        if not known:
            seconds += self.habits.compile_s * (1 if engine == "a" else 3)
        known.add(prompt)
        self.now_s += 2e-5
        self._until_s[engine] = max(self.now_s, *self._until_s.values(), 0.0) + seconds  # one at a time
        self._made[engine] = made

    def wait(self, engine: str) -> int:
        if engine not in self._until_s:
            raise ValueError(f"to wait for {engine!r}, which was not started")
        self.now_s = max(self.now_s, self._until_s[engine])
        return self._made[engine]


def check(work: Attempt) -> Report:
    """Whether the benchmark is right on every machine."""
    rng = work.random
    submission = Submission(work.folder / FILE, "measure", "conversation")
    remarks, errors = [], []
    for words, habits_of in MACHINES.items():
        token_s = {engine: float(rng.uniform(0.004, 0.03)) for engine in "ab"}
        habits = Habits(float(rng.uniform(2, 20)), True, True, float(rng.uniform(0.01, 0.05)), 0.15)
        machine = SimulatedMachine(token_s, habits_of(habits), rng)
        try:
            ratio = _ratio(submission, machine)
        except SubmissionError as error:
            errors.append(str(error))
            remarks.append(Remark(f"{words}: {error}", right=False))
        else:
            right = abs(ratio / machine.truth - 1) <= TOLERANCE
            remarks.append(Remark(f"{words}: it says {ratio:.3g}x, and {machine.truth:.3g}x is true", right))
    if len(errors) == len(MACHINES) and len(set(errors)) == 1:
        return Report((Remark(f"on every machine: {errors[0]}", right=False),))
    return Report(tuple(remarks))


def _ratio(submission: Submission, machine: SimulatedMachine) -> float:
    """What the benchmark says about a machine. SubmissionError: no number."""
    try:
        result = conversation(submission, machine.answer)
    except SubmissionError as error:
        if "ZeroDivisionError" in str(error):
            raise SubmissionError(f"{error}; the clock ticks once in a millisecond") from None
        raise
    if isinstance(result, bool) or not isinstance(result, int | float):
        raise SubmissionError(f"it returned {result!r:.40}, expected a number")
    return result
