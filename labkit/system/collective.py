"""Work that all ranks do at the same time. If it fails on one rank, all ranks raise the error, so that none waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from labkit.system.errors import RunError, UserError

Gather = Callable[[Any], list[Any]]  # this rank's value -> the values of all ranks, in rank order
T = TypeVar("T")


def alone(own: T) -> list[T]:
    """The `Gather` of a single process."""
    return [own]


def results_of_ranks(work: Callable[[], T], gather: Gather, failure: str = "") -> list[T]:
    """Returns the results of all ranks' `work`, on every rank, in rank order. Results must be picklable.

    All ranks raise one rank's error if it comes from a file (RunError, with `failure` before the reason) or from a
    wrong argument (UserError). Any other error is raised on its rank alone: the shared call around the work passes it
    to the other ranks.
    """
    outcome: tuple[T | None, str | None, bool]
    try:
        outcome = (work(), None, False)
    except (OSError, ValueError) as error:
        outcome = (None, str(error), isinstance(error, ValueError))
    outcomes = gather(outcome)
    for _, reason, wrong_argument in outcomes:
        if reason is not None:
            raise UserError(reason) if wrong_argument else RunError(f"{failure}: {reason}" if failure else reason)
    return [result for result, _, _ in outcomes]


def own_result(work: Callable[[], T], gather: Gather) -> T:
    """Returns the result of this rank's `work`, of any type, once the work is done on all ranks. Raises as
    `results_of_ranks`.
    """
    own: list[T] = []
    results_of_ranks(lambda: own.append(work()), gather)
    return own[0]
