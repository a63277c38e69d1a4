"""The process that measures: `python -P -m labkit.harness.streaming.worker`.

The order is JSON on stdin. The answer is lines of JSON on the stdout that the process started with: progress, and at
the end the findings or an error. The prints of libraries go to stderr.
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
    """Measures the order from stdin."""
    end_with_parent()
    logging.set_verbosity_error()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def send(**answer: object) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        order = StreamOrder.model_validate_json(sys.stdin.read())
        findings = measure(order, lambda done, total, label: send(done=done, total=total, label=label))
    except (UserError, OSError) as error:
        send(error=str(error))
        raise
    send(found=findings.model_dump(mode="json"))


if __name__ == "__main__":
    main()
