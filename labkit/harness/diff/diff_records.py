"""`diff_records` compares two sets of records, and doubts the ratios that the machine itself may explain."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from labkit.harness.diff.change_of import AGAIN, change_of
from labkit.harness.diff.changes import Change, RecordsDiff
from labkit.harness.diff.timed import DEFAULT_METRIC, CaseWords, TimedSide, timed_sides
from labkit.harness.environment import PACKAGES, Environment
from labkit.harness.records import METRICS
from labkit.harness.results import load_records
from labkit.statistics import Trust, Verdict
from labkit.statistics.trust import Doubt
from labkit.system.asked_from import setting
from labkit.system.bounds import check_numbers
from labkit.system.errors import UserError
from labkit.system.nearest import did_you_mean

TOLERANCE = 0.05  # one build on one quiet machine differs by a few percent from day to day
MACHINE = ("gpu", "cpu", "cores")  # records that differ in one of these come from different machines
SOFTWARE = (
    *("commit", *PACKAGES, "compiler", "python", "driver", "cuda"),
    *("system", "governor", "transparent_huge_pages"),
)
MOST_NAMED = 5  # cases in a message


def diff_records(
    before: str | os.PathLike[str],
    after: str | os.PathLike[str],
    *,
    metric: str = DEFAULT_METRIC,
    tolerance: float = TOLERANCE,
    across_machines: bool = False,
) -> RecordsDiff:
    """Compares the records of two files, or of two folders of such files, case by case. The latest record of a case
    counts.

    metric: "per_token", "ttft" or "end_to_end" of generation. Only "per_token" also compares regions, sums over ranks
    and loading.
    tolerance: the smallest change that counts, as a fraction.
    across_machines: compare records of two machines, which are refused otherwise.

    Two times share no rounds, so the machine's drift stays in the ratio. If both records have a probed rate for each
    turn, only turns at rates of the memory that both had are compared, unless the side's time does not follow the rate.
    A ratio is not trusted in three cases: a side with other people's unchanged code changed as well, the two records
    have no rate in common, or the read bandwidth around the runs changed so much that this alone explains the ratio.

    UserError: nothing at a path, no record with this metric, no common case, two machines.
    """
    if metric not in METRICS:
        raise UserError(
            f"unknown metric {metric!r}{did_you_mean(metric, METRICS)}; expected one of {', '.join(METRICS)}"
        )
    check_numbers(tolerance=tolerance)
    sides_before, omitted_before = _latest(before, metric)
    sides_after, omitted_after = _latest(after, metric)
    pairs = [(side, sides_after[words]) for words, side in sides_before.items() if words in sides_after]
    if not pairs:
        raise UserError(
            f"got no common case: {before} has {_first_names(sides_before)}, and {after} has "
            f"{_first_names(sides_after)}; expected records of the same model, dtype, batch, tokens, threads and side"
        )
    differences = _differences([pair for pair in pairs if _machine(pair[0]) != _machine(pair[1])], MACHINE)
    if differences and not across_machines:
        raise UserError(
            f"got records of two machines ({'; '.join(differences)}), whose difference hides what changed in the code; "
            f"expected records of one machine. To compare machines: {setting('across_machines')}"
        )
    changes = [
        change_of(*pair, tolerance=tolerance, ratios=len(pairs), equal_rates=not across_machines) for pair in pairs
    ]
    return RecordsDiff(
        before=str(before),
        after=str(after),
        metric=metric,
        tolerance=tolerance,
        changes=tuple(changes if across_machines else _doubted(changes)),
        only_before=tuple(words for words in sides_before if words not in sides_after),
        only_after=tuple(words for words in sides_after if words not in sides_before),
        environment=differences + _differences(pairs, SOFTWARE),
        remarks=tuple(f"{path}: {text}" for path, text in ((before, omitted_before), (after, omitted_after)) if text),
    )


def _latest(path: str | os.PathLike[str], metric: str) -> tuple[dict[CaseWords, TimedSide], str]:
    """The latest timed sides by their words, and a sentence about the records that were left out."""
    records = load_records(path)
    latest: dict[CaseWords, TimedSide] = {}
    older = untimed = 0
    for record in records:
        sides = timed_sides(record, metric)
        untimed += not sides
        for side in sides:
            known = latest.get(side.words)
            older += known is not None and known.created != side.created  # sides of several comparisons are one
            if known is None or side.created >= known.created:
                latest[side.words] = side
    if not latest:
        content = f"{len(records)} records, none of them timed by {metric}" if records else "no record"
        raise UserError(f"got {path} with {content}; expected records of `labkit compare` or `labkit kernels`")
    left_out = [f"{untimed} records that are not timed by {metric}"] if untimed else []
    left_out += [f"{older} older measurements of the same sides"] if older else []
    return latest, f"left out {' and '.join(left_out)}" if left_out else ""


def _doubted(changes: Sequence[Change]) -> Iterable[Change]:
    """The changes, with doubts where unchanged code of others changed its speed between the two times."""
    controls: dict[CaseWords, Change] = {}
    for change in changes:
        unchanged = change.before.foreign and change.before.foreign == change.after.foreign
        if unchanged and change.ratio.verdict in (Verdict.FASTER, Verdict.SLOWER):
            controls.setdefault(change.after.case, change)
    for change in changes:
        doubts = []
        if control := controls.get(change.after.case):
            name, verdict = control.after.name, control.ratio.verdict.lower()
            why = f"{name}, whose code is the same, became {verdict} ({control.ratio}): the machine itself changed"
            doubts.append(Doubt(why, (AGAIN,)))
        yield replace(change, trust=Trust((*change.trust.doubts, *doubts)))


def _differences(pairs: Sequence[tuple[TimedSide, TimedSide]], fields: Collection[str]) -> tuple[str, ...]:
    """Differences between the environments of the two times: "commit a, then b"."""
    before, after = (_values((pair[time].environment for pair in pairs), fields) for time in (0, 1))
    return tuple(
        f"{name} {', '.join(before.get(name, ['none']))}, then {', '.join(after.get(name, ['none']))}"
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name)
    )


def _machine(side: TimedSide) -> tuple[object, ...]:
    return tuple(getattr(side.environment, name) for name in MACHINE)


def _values(environments: Iterable[Environment], fields: Collection[str]) -> dict[str, list[str]]:
    """The distinct values of each field or package that has one."""
    distinct: dict[str, dict[str, None]] = {}
    for environment in environments:
        known = {**vars(environment), **environment.packages}
        for name in fields:
            if known.get(name) is not None:
                distinct.setdefault(name, {})[str(known[name])] = None
    return {name: sorted(values) for name, values in distinct.items()}


def _first_names(sides: Mapping[CaseWords, TimedSide]) -> str:
    names = [", ".join(text for _, text in words) for words in sides]
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return "; ".join(names[:MOST_NAMED]) + more
