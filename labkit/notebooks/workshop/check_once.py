"""Checks one exercise: `python -P -m labkit.notebooks.workshop.check_once FOLDER EXERCISE LEARNER SEED`.

Prints the first remark that is not right as JSON; an empty one: everything is right.
"""

import json
import sys
from pathlib import Path

from labkit.notebooks.workshop.exercises import Attempt, find_exercise


def main() -> None:
    folder, name, learner, seed = sys.argv[1:]
    exercise = find_exercise(name)
    report = exercise.check(Attempt(Path(folder), exercise.parameters(learner), int(seed)))
    wrong = [remark.text for remark in report.remarks if not remark.right]
    remark = "" if report.passed else (wrong or ["nothing was checked"])[0]
    sys.stdout.write(json.dumps({"remark": remark}) + "\n")


if __name__ == "__main__":
    main()
