"""Measures a plan in a process of its own."""

from __future__ import annotations

import json
import os
import sys

from labkit.harness.compare.installation import FIXED
from labkit.harness.streaming.make import writable_folder
from labkit.harness.streaming.measure import StreamFindings, StreamOrder, typical_rates
from labkit.harness.streaming.plan import StreamingPlan
from labkit.harness.streaming.records import MemorySample
from labkit.system.bounds import check_numbers
from labkit.system.child import child_lines
from labkit.system.errors import UserError
from labkit.system.progress import Progress, unheard

EPOCHS_OF_BATCH = 3  # of each batch
COMMAND = (sys.executable, "-P", "-m", "labkit.harness.streaming.worker")


def measured_plan(
    plan: StreamingPlan,
    *,
    batches: tuple[int, ...] = (),
    path: str | os.PathLike[str] | None = None,
    seed: int = 0,
    rounds: int = EPOCHS_OF_BATCH,
    progress: Progress | None = None,
) -> tuple[StreamingPlan, tuple[MemorySample, ...]]:
    """The plan with measured points and with the rates probed between their turns, and the memory over time.

    plan: must be a plan of this machine.
    batches: batches to measure, all of which must fit; empty: growing batches, until a larger batch gives no more
    tokens per second or does not fit.
    path: a folder for the packed weights; None: labkit's own cache folder.
    rounds: epochs of each batch, each with a new engine; trusted figures take 3 or more.

    UserError for a batch that does not fit, and where the engine refuses the case. RunError where the process dies.
    """
    check_numbers(seed=seed, rounds=rounds)
    for batch in batches:
        check_numbers(batch=batch)
        if batch > plan.largest_batch:
            raise UserError(
                f"got batch {batch:,} in {plan.case.memory_gb:g} GB, expected at most {plan.largest_batch:,}: allow "
                "more memory, or fewer tokens"
            )
    order = StreamOrder(plan=plan, folder=str(writable_folder(path)), batches=batches, seed=seed, rounds=rounds)
    findings = _findings(order, progress or unheard)
    rates = plan.rates.model_copy(update=typical_rates(findings.points)._asdict())
    return plan.model_copy(update={"points": findings.points, "rates": rates}), findings.memory


def _findings(order: StreamOrder, follow: Progress) -> StreamFindings:
    environment = os.environ | FIXED | {"OMP_NUM_THREADS": str(order.plan.case.threads)}
    failure = f"{order.plan.case.title} could not be measured"
    for line in child_lines(COMMAND, failure, given=order.model_dump_json(), environment=environment):
        message = json.loads(line)
        if "error" in message:
            raise UserError(message["error"])
        if "found" in message:
            return StreamFindings.model_validate(message["found"])
        follow(message["done"], message["total"], message["label"])
    raise AssertionError("the process ended without an answer")
