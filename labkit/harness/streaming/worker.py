"""The process that measures: `python -P -m labkit.harness.streaming.worker`.

The order comes as JSON on stdin. The answer is lines of JSON on what was stdout when the process started: progress, and
at the end the findings or what went wrong. Whatever a library prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys

from transformers.utils import logging

from labkit.harness.streaming.measure import StreamOrder, measure
from labkit.system.errors import UserError
from labkit.system.lifetime import end_with_parent


def main() -> None:
    """Measures what is ordered."""
    end_with_parent()
    logging.set_verbosity_error()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**answer: object) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        order = StreamOrder.model_validate_json(sys.stdin.read())
        found = measure(order, lambda done, total, label: say(done=done, total=total, label=label))
    except (UserError, OSError) as error:
        say(error=str(error))
        raise
    say(found=found.model_dump(mode="json"))


if __name__ == "__main__":
    main()
