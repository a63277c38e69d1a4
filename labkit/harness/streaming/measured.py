"""A plan with what was measured of it, in a process of its own."""

from __future__ import annotations

import json
import os
import sys

from labkit.engine.offload.prepared import folder_for
from labkit.harness.compare.sides import FIXED
from labkit.harness.streaming.measure import StreamFindings, StreamOrder, typical_rates
from labkit.harness.streaming.plan import StreamingPlan
from labkit.harness.streaming.records import MemorySample
from labkit.system.asked_from import setting
from labkit.system.bounds import check_numbers
from labkit.system.child import child_lines
from labkit.system.errors import UserError
from labkit.system.output_folder import check_output_folder
from labkit.system.progress import Progress, unheard

COMMAND = (sys.executable, "-P", "-m", "labkit.harness.streaming.worker")


def measured_plan(
    plan: StreamingPlan,
    *,
    batches: tuple[int, ...] = (),
    path: str | os.PathLike[str] | None = None,
    seed: int = 0,
    rounds: int = 1,
    progress: Progress | None = None,
) -> tuple[StreamingPlan, tuple[MemorySample, ...]]:
    """The plan with points, whose rates are now those that were probed beside these, and the memory over time.

    batches: those to measure; they have to fit. None: growing ones, until a larger batch gives no more tokens per
    second or nothing larger fits. path: a folder for the packed weights; None: labkit's own for caches. The plan has to
    be one of this machine. rounds: timed runs of each batch; 6 or more for figures that are trusted.

    UserError for a batch that does not fit, and for what the engine refuses. RunError where the process dies.
    """
    check_numbers(seed=seed, rounds=rounds)
    for batch in batches:
        check_numbers(batch=batch)
        if batch > plan.largest_batch:
            raise UserError(
                f"got batch {batch:,} in {plan.case.memory_gb:g} GB, expected at most {plan.largest_batch:,}: allow "
                "more memory, or fewer tokens"
            )
    folder = check_output_folder(folder_for(path), what="streamed weights", option=setting("path"))
    order = StreamOrder(plan=plan, folder=str(folder), batches=batches, seed=seed, rounds=rounds)
    found = _found(order, progress or unheard)
    disk, peak = typical_rates(found.points)
    rates = plan.rates.model_copy(update={"disk_gb_s": disk, "gflop_s": peak})
    return plan.model_copy(update={"points": found.points, "rates": rates}), found.memory


def _found(order: StreamOrder, follow: Progress) -> StreamFindings:
    environment = os.environ | FIXED | {"OMP_NUM_THREADS": str(order.plan.case.threads)}
    failed = f"{order.plan.case.title} could not be measured"
    for line in child_lines(COMMAND, failed, given=order.model_dump_json(), environment=environment):
        said = json.loads(line)
        if "error" in said:
            raise UserError(said["error"])
        if "found" in said:
            return StreamFindings.model_validate(said["found"])
        follow(said["done"], said["total"], said["label"])
    raise AssertionError("the process ended without a word")
