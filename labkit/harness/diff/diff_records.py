"""`diff_records`: two sets of records held against each other, and when what they say is not to be trusted."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from labkit.harness.diff.changes import Change, RecordsDiff
from labkit.harness.diff.timed import DEFAULT_METRIC, CaseWords, TimedSide, timed_sides
from labkit.harness.environment import PACKAGES, Environment
from labkit.harness.records import METRICS
from labkit.harness.results import load_records
from labkit.statistics import Trust, Verdict, grade, unpaired_ratio
from labkit.statistics.trust import Doubt
from labkit.system.asked_from import setting
from labkit.system.bounds import check_numbers
from labkit.system.errors import UserError
from labkit.system.nearest import did_you_mean

TOLERANCE = 0.05  # one build on one quiet machine differs by a few percent from day to day
MACHINE = ("gpu", "cpu", "cores")  # where one of these differs, times are those of machines
SOFTWARE = (
    *("commit", *PACKAGES, "compiler", "python", "driver", "cuda"),
    *("system", "governor", "transparent_huge_pages"),
)
AGAIN = "measure both again, one right after the other"
MOST_NAMED = 5  # cases in a message


def diff_records(
    before: str | os.PathLike[str],
    after: str | os.PathLike[str],
    *,
    metric: str = DEFAULT_METRIC,
    tolerance: float = TOLERANCE,
    across_machines: bool = False,
) -> RecordsDiff:
    """Hold the records of a file, or of a folder of such files, against those of another, case by case.

    metric: "per_token", "ttft" or "end_to_end" of what generates; only the first also compares regions, sums over ranks
    and loading. tolerance: from which change on it counts, a fraction. Of a case that was measured more than once, the
    latest record is taken.

    Two times share no rounds, so what the machine did meanwhile stays in the ratio. It is not trusted where a side of
    other people's code, which is still the same, changed as well, and where the read bandwidth beside the runs changed
    so much that this alone explains it. across_machines: compare what two machines took; else records of different
    machines are refused.

    UserError: nothing there, no record that is timed by this metric, no case in common, two machines.
    """
    if metric not in METRICS:
        raise UserError(
            f"unknown metric {metric!r}{did_you_mean(metric, METRICS)}; expected one of {', '.join(METRICS)}"
        )
    check_numbers(tolerance=tolerance)
    (first, left_out), (second, left_out_too) = _latest(before, metric), _latest(after, metric)
    pairs = [(first[words], second[words]) for words in first if words in second]
    if not pairs:
        raise UserError(
            f"got no case that is in both: {before} has {_few(first)}, and {after} has {_few(second)}; expected "
            "records of the same model, dtype, batch, tokens, threads and side"
        )
    differences = _differences([pair for pair in pairs if _machine(pair[0]) != _machine(pair[1])], MACHINE)
    if differences and not across_machines:
        raise UserError(
            f"got records of two machines ({'; '.join(differences)}), whose times tell the machines apart and not what "
            f"changed; expected those of one machine. To compare machines: {setting('across_machines')}"
        )
    changes = [_change(*pair, len(pairs), tolerance) for pair in pairs]
    return RecordsDiff(
        before=str(before),
        after=str(after),
        metric=metric,
        tolerance=tolerance,
        changes=tuple(changes if across_machines else _doubted(changes)),
        only_before=tuple(words for words in first if words not in second),
        only_after=tuple(words for words in second if words not in first),
        environment=differences + _differences(pairs, SOFTWARE),
        remarks=tuple(f"{path}: {text}" for path, text in ((before, left_out), (after, left_out_too)) if text),
    )


def _latest(path: str | os.PathLike[str], metric: str) -> tuple[dict[CaseWords, TimedSide], str]:
    """The timed sides by their words, of each the latest, and what was left out, in words."""
    records = load_records(path)
    found: dict[CaseWords, TimedSide] = {}
    older = untimed = 0
    for record in records:
        sides = timed_sides(record, metric)
        untimed += not sides
        for side in sides:
            other = found.get(side.words)
            older += other is not None and other.created != side.created  # sides of several comparisons are one
            if other is None or side.created >= other.created:
                found[side.words] = side
    if not found:
        what = f"{len(records)} records, none of them timed by {metric}" if records else "no record"
        raise UserError(f"got {path} with {what}; expected what `labkit compare` or `labkit kernels` wrote")
    said = [f"{untimed} records that are not timed by {metric}"] if untimed else []
    said += [f"{older} older measurements of the same sides"] if older else []
    return found, f"left out {' and '.join(said)}" if said else ""


def _change(before: TimedSide, after: TimedSide, ratios: int, tolerance: float) -> Change:
    found = unpaired_ratio(before.rounds, after.rounds, tolerance=tolerance, ratios=ratios)
    fewest = min(len(before.rounds), len(after.rounds))
    most = max((side.taken_cores for side in (before, after)), key=lambda taken: sum(taken) / max(len(taken), 1))
    shares = [side.share for side in (before, after) if side.share is not None]
    return Change(before, after, found, grade(found, fewest, taken_cores=most, shares=shares))


def _doubted(changes: Sequence[Change]) -> Iterable[Change]:
    """The changes, with the doubts that what the machine did between the two times leaves."""
    controls: dict[CaseWords, Change] = {}
    for change in changes:
        unchanged = change.before.foreign and change.before.foreign == change.after.foreign
        if unchanged and change.ratio.verdict in (Verdict.FASTER, Verdict.SLOWER):
            controls.setdefault(change.after.case, change)
    for change in changes:
        doubts = []
        if control := controls.get(change.after.case):
            name, verdict = control.after.name, control.ratio.verdict.lower()
            why = f"{name}, whose code is the same, became {verdict} ({control.ratio}): the machine was in another mood"
            doubts.append(Doubt(why, (AGAIN,)))
        if reason := _bandwidth_changed(change):
            doubts.append(Doubt(reason, (AGAIN,)))
        yield replace(change, trust=Trust((*change.trust.doubts, *doubts)))


def _bandwidth_changed(change: Change) -> str:
    """Why the read bandwidth of the two times may explain a verdict; empty where it does not."""
    before, after, found = change.before.bandwidth_gb_s, change.after.bandwidth_gb_s, change.ratio
    if before is None or after is None or max(before, after) <= (1 + found.noise) * min(before, after):
        return ""
    explained = after / before
    left = replace(found, value=found.value / explained, low=found.low / explained, high=found.high / explained)
    if left.verdict is found.verdict:
        return ""
    return f"memory was read at {before:.0f} GB/s before and at {after:.0f} after, which may explain it"


def _differences(pairs: Sequence[tuple[TimedSide, TimedSide]], fields: Collection[str]) -> tuple[str, ...]:
    """What the environments of the two times do not agree in: "commit a, then b"."""
    before, after = (_values((pair[time].environment for pair in pairs), fields) for time in (0, 1))
    return tuple(
        f"{name} {', '.join(before.get(name, ['none']))}, then {', '.join(after.get(name, ['none']))}"
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name)
    )


def _machine(side: TimedSide) -> tuple[object, ...]:
    return tuple(getattr(side.environment, name) for name in MACHINE)


def _values(environments: Iterable[Environment], fields: Collection[str]) -> dict[str, list[str]]:
    """By field or package that has a value, each of its values once."""
    found: dict[str, dict[str, None]] = {}
    for environment in environments:
        known = {**vars(environment), **environment.packages}
        for name in fields:
            if known.get(name) is not None:
                found.setdefault(name, {})[str(known[name])] = None
    return {name: sorted(values) for name, values in found.items()}


def _few(found: Mapping[CaseWords, TimedSide]) -> str:
    names = [", ".join(text for _, text in words) for words in found]
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return "; ".join(names[:MOST_NAMED]) + more
