"""If a rank fails or dies in a step that computes full logits, the other ranks report it and none crashes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.ranks import lost_ranks
from helpers.ranks.lost_ranks import BEFORE, MEETINGS, REASON
from helpers.sweeps import sweep

pytestmark = pytest.mark.timeout(300)
STEPS = 2  # of a generation; a rank is killed at each of their meetings
TOGETHER = "all ranks of a model make the same calls, or none goes on"


def test_a_rank_that_fails_at_any_meeting_or_step_gives_its_reason_to_the_others(of_two: Any) -> None:
    survivor, failed = (rank["lost"] for rank in of_two.answers)
    assert set(survivor) == set(failed)
    assert len(failed) == sum(MEETINGS.values()) + 6 * len(MEETINGS)
    assert all(REASON in message for message in failed.values())
    for point, message in survivor.items():
        assert message.startswith("RankFailedError: rank 1: RuntimeError: "), point
        assert REASON in message, point


@sweep
@pytest.mark.parametrize("way", lost_ranks.WAYS)
@pytest.mark.parametrize("model", MEETINGS)
def test_the_survivor_of_a_kill_at_any_meeting_names_the_lost_rank(model: str, way: str) -> None:
    """Each rank is killed in turn. A step has an odd number of meetings with gptj, and an even one with the others."""
    meetings = BEFORE + MEETINGS[model] * (1 if way == "forward" else STEPS)
    script = Path(lost_ranks.__file__)
    lines = subprocess.run(
        [sys.executable, "-P", str(script), model, way, str(meetings)],
        env=os.environ | {"PYTHONPATH": str(script.parents[2])},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert len(lines) == 2 * meetings
    for outcome in map(json.loads, lines):
        victim = outcome["victim"]
        assert outcome["victim's code"] == -9, outcome
        assert outcome["survivor's code"] == 0, outcome
        expected = f"LostRankError: rank {1 - victim}: rank {victim} has ended; {TOGETHER}"
        assert outcome["survivor said"] == expected, outcome
