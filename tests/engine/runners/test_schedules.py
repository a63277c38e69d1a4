"""When each schedule begins the steps of its micro-batches, recorded by a fake runner."""

import pytest
import torch

from labkit.engine.runners.driving import Loop
from labkit.engine.runners.pipeline.schedules import SCHEDULES
from labkit.engine.runners.step import StepInput, StepOutput

LENGTHS = (3, 1, 2)  # steps of each micro-batch


class Noted:
    """A step that is done when it is collected."""

    def __init__(self, notes: list[str], batch: int) -> None:
        self.notes, self.batch = notes, batch
        notes.append(f"b{batch}")

    def collect(self) -> StepOutput:
        self.notes.append(f"c{self.batch}")
        return StepOutput()


def notes_of(schedule: str) -> list[str]:
    """Events: b0 means that a step of micro-batch 0 begins, c0 that it is collected."""
    notes: list[str] = []

    def loop(batch: int) -> Loop:
        for _ in range(LENGTHS[batch]):
            yield StepInput(torch.full((1, 1), batch), cache=caches[batch], follows=True)  # type: ignore[arg-type]
        return torch.tensor([batch])

    caches = [object() for _ in LENGTHS]

    def begin(step: StepInput) -> Noted:
        return Noted(notes, next(index for index, cache in enumerate(caches) if cache is step.cache))

    results = SCHEDULES[schedule](begin, [loop(batch) for batch in range(3)])
    assert [int(result) for result in results if isinstance(result, torch.Tensor)] == [0, 1, 2]
    return notes


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("queue", "b0 b1 b2 c0 b0 c1 c2 b2 c0 b0 c2 c0"),
        ("barrier", "b0 b1 b2 c0 c1 c2 b0 b2 c0 c2 b0 c0"),
        ("rounds", "b0 b1 b2 c0 b0 c1 b1 c2 b2 c0 b0 c1 b1 c2 b2 c0"),
    ],
)
def test_a_step_is_begun_when_its_schedule_says(schedule: str, expected: str) -> None:
    assert " ".join(notes_of(schedule)) == expected
