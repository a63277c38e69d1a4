"""The cost of turns: the steps of a side within turns of a few tokens, against its steps in an unbroken run, and the
processor time of a side that is paused.

python -P -m labkit.bench.turns [--model gpt2] [--sides fused,hf-eager] [--rounds 60]

Two processes of the same side generate. A round has turns of the first side between turns of the second, as in a
comparison, and an unbroken run of the first side, in random order.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from time import sleep
from typing import Annotated

import numpy as np
import psutil
import typer

from labkit.bench.bars import BarCheck, BarUnit, at_most
from labkit.bench.page import Threads, print_checks
from labkit.harness.compare.compare import comparison_case
from labkit.harness.compare.measured_side import MeasuredSide
from labkit.harness.compare.plan import Prepared, Schedule, SideSpec, prepare
from labkit.harness.compare.side_process import SideProcesses
from labkit.harness.rounds import random_orders
from labkit.harness.turns.looks import usual_steps
from labkit.statistics import ratio
from labkit.system.comma_list import listed
from labkit.system.command import run_command

PROMPT, NEW = 128, 512
TURNS = 3  # of a round
PAUSE_S = 5.0
COST, PAUSED = 0.01, 0.01  # of a step; of a processor
FINE, PERCENT = BarUnit("{:.3f}x", "{:g}x"), BarUnit("{:.2%}", "{:.0%}")


@dataclass
class _Generations:
    """Two sides in the middle of a generation. Both are always at the same token."""

    sides: tuple[MeasuredSide, MeasuredSide]
    seed: int = 0
    left: int = 0  # steps

    def reserve(self, steps: int) -> None:
        """Begins the next prompt on both sides where the present generation has fewer steps left."""
        if self.left < steps:
            self.seed, self.left = self.seed + 1, NEW - 1
            for side in self.sides:
                side.begin(self.seed)
        self.left -= steps

    def in_turns_ms(self, steps: int) -> float:
        """Mean step of the first side's turns, without the first step of each."""
        side, other = self.sides
        counted: list[float] = []
        self.reserve(TURNS * steps)
        for _ in range(TURNS):
            other.turn(steps)
            counted += side.turn(steps)[0][1:]
        return float(np.mean(counted))

    def unbroken_ms(self, steps: int) -> float:
        """Mean step of a run of the first side, after as many steps as a turn has."""
        side, other = self.sides
        self.reserve((TURNS + 1) * steps)
        unbroken = side.turn((TURNS + 1) * steps)[0][steps:]
        other.turn((TURNS + 1) * steps)
        return float(np.mean(unbroken))

    def paused(self) -> float:
        """The processors that the paused processes of the first side keep busy."""
        processes = [psutil.Process(pid) for pid in self.sides[0].process.pids]
        self.reserve(3)
        for side in self.sides:
            side.turn(3)
        before_s = sum(sum(process.cpu_times()[:2]) for process in processes)
        sleep(PAUSE_S)
        return (sum(sum(process.cpu_times()[:2]) for process in processes) - before_s) / PAUSE_S


def checks_of(spec: SideSpec, prepared: Prepared, rounds: int) -> list[BarCheck]:
    """The bars of one side."""
    with ExitStack() as stack:
        processes = [stack.enter_context(SideProcesses(spec.label, spec.threads, spec.ranks)) for _ in range(2)]
        first, second = (
            MeasuredSide(spec.label, spec, process, prepared, Schedule(warm_up=16)) for process in processes
        )
        for side in (first, second):
            side.load(None)
        generations = _Generations((first, second))
        steps = usual_steps(generations.unbroken_ms(3))
        in_turns_ms: list[float] = []
        unbroken_ms: list[float] = []
        for _, order in zip(range(rounds), random_orders(2), strict=False):
            for kind in order:
                if kind:
                    in_turns_ms.append(generations.in_turns_ms(steps))
                else:
                    unbroken_ms.append(generations.unbroken_ms(steps))
        paused = generations.paused()
    cost = ratio(in_turns_ms, unbroken_ms)
    step = f"{spec.label}: a step of {np.median(unbroken_ms):.2f} ms, in turns of {steps} / in an unbroken run"
    return [
        at_most(step, cost, 1 + COST, FINE),
        at_most(f"{spec.label}: processors taken while it is paused", paused, PAUSED, PERCENT),
    ]


def main(
    model: Annotated[str, typer.Option(help="A preset, a checkpoint folder or a GGUF file.")] = "gpt2",
    dtype: Annotated[str, typer.Option(help="Precision of the weights.")] = "float32",
    sides: Annotated[str, typer.Option(help="Sides that can pause, separated by commas.")] = "fused,hf-eager",
    rounds: Annotated[int, typer.Option(min=2)] = 60,
    threads: Threads = None,
) -> None:
    """Measure the cost of turns."""
    case = comparison_case(model=model, dtype=dtype, batch=1, prompt=PROMPT, new=NEW, threads=threads)
    for label in listed(sides):
        spec = SideSpec.named(label, case.threads)
        print_checks(checks_of(spec, prepare([spec], case, Schedule()), rounds))


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
