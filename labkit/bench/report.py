"""The report of `labkit.bench.models`: checks of the records against their targets, and a page in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from labkit.bench.bars import SHARE, BarCheck, at_least, at_most, short_of
from labkit.bench.page import NONE, markdown_table, page_of, ratio_cell, verdict, way_of
from labkit.bench.targets import FUSED, INT4_ROWS, MEMORY, PRECISIONS, TARGETS, Sides, Target
from labkit.harness.comparison import Comparison
from labkit.harness.records import Measurement, number_or_unknown

TITLES = {FUSED: ""} | {sides: f"{name} weights: " for sides, name in PRECISIONS.items()}
TITLES[INT4_ROWS] = f"{PRECISIONS[INT4_ROWS]} weights, several sequences: "


@dataclass(frozen=True)
class Row:
    """A target and its measurements."""

    target: Target
    main: Comparison  # with the baseline
    peer: Comparison | None = None

    @property
    def comparisons(self) -> tuple[Comparison, ...]:
        return (self.main,) if self.peer is None else (self.main, self.peer)

    @property
    def sides(self) -> dict[str, Measurement]:
        """All sides by name, the candidate last."""
        baselines = {comparison.baseline.name: comparison.baseline for comparison in self.comparisons}
        return baselines | {self.main.candidate.name: self.main.candidate}

    @cached_property
    def checks(self) -> dict[str, BarCheck]:
        """The possible checks, by the name of their field in `Target`, and "memory" and "tokens"."""
        target, candidate = self.target, self.main.candidate
        checks = {"per_token": _faster(target.per_token, self.main, "per_token")}
        if target.limit_share is not None and candidate.floor_share is not None:
            share = candidate.floor_share
            checks["limit_share"] = at_least("share of the limit", share, target.limit_share, SHARE)
        if target.ttft is not None:
            checks["ttft"] = _faster(target.ttft, self.main, "ttft")
        if target.prompt_share is not None and (prompt_share := candidate.prompt_share) is not None:
            figure = "share of the limit, to the first token"
            checks["prompt_share"] = at_least(figure, prompt_share, target.prompt_share, SHARE)
        if target.llama_cpp is not None and self.peer is not None:
            checks["llama_cpp"] = _faster(target.llama_cpp, self.peer, "per_token")
            checks["llama_cpp_ttft"] = _faster(target.llama_cpp_ttft, self.peer, "ttft")
        if memory := memory_share(candidate):
            checks["memory"] = at_most("peak memory", memory, MEMORY)
        if target.dtype == "float32" and target.sides is FUSED:
            checks["tokens"] = BarCheck("tokens", tokens(self.main), "equal", self.main.tokens_equal)
        return checks


def rows(records: Iterable[Comparison]) -> list[Row]:
    """The targets that the records cover, in their order; the latest record of a kind counts."""
    latest = {(*key(record), record.baseline.name): record for record in records}
    return [
        Row(target, latest[*target.key, target.sides.baseline], latest.get((*target.key, target.sides.peer)))
        for target in TARGETS
        if (*target.key, target.sides.baseline) in latest
    ]


def key(record: Comparison) -> tuple[str, str, int, str]:
    """The `Target.key` of a record's target."""
    return record.case.model, record.case.dtype, record.case.batch, record.candidate.name


def memory_share(side: Measurement) -> float | None:
    """Peak memory of a side / bytes of the weights and KV cache of its case."""
    if side.peak_rss_mb is None or side.work is None:
        return None
    return side.peak_rss_mb * 1e6 / (side.work.weight_bytes + side.work.kv_bytes)


def tokens(comparison: Comparison) -> str:
    """The agreement of both sides' tokens, in words."""
    return "equal" if comparison.tokens_equal else f"differ from new token {comparison.first_difference} on"


def _faster(bar: float, comparison: Comparison, metric: str) -> BarCheck:
    ratio = comparison.ratio(metric)
    words = "to the first token" if metric == "ttft" else "per token"
    figure = f"{comparison.baseline.name} / {comparison.candidate.name} {words}"
    share = comparison.candidate.floor_share if metric == "per_token" else None
    trusted = comparison.trust(metric).trustworthy
    return at_least(figure, ratio, bar, possible=short_of(bar, ratio, share), trusted=trusted)


def report(records: Sequence[Comparison]) -> str:
    """The page of at least one case. Ratios are baseline / candidate, with 95 % intervals over epochs or rounds."""
    measured = rows(records)
    case, environment = records[0].case, records[0].candidate.environment
    judged = [(row.target.name, check) for row in measured for check in row.checks.values()]
    return page_of(
        f"Fused against vanilla, {len(measured)} cases, on {environment.machine}",
        f"Prompt {case.prompt_tokens}, {case.new_tokens} new greedy tokens, {case.threads} threads; "
        f"{way_of(records)}, each side in its own process. Times are medians over them. In brackets is the share of "
        "the limit: the least time of a step / its measured time. The least time is how long the memory, probed beside "
        "each turn, needs for the bytes of a step, and the processor for multiplying them. Ratios are baseline / "
        "candidate with 95 % intervals.",
        verdict(judged, f", {len(measured)} of {len(TARGETS)} cases measured"),
        *(section for sides in TITLES for section in _sections(sides, measured)),
        "## Environment",
        _environment(records),
        "## Remarks",
        "\n".join(f"- {row.target.name}: {remark}" for row in measured for remark in _remarks(row)) or "None.",
    )


def _sections(sides: Sides, measured: Sequence[Row]) -> list[str]:
    """The tables of the cases with the same sides."""
    measured = [row for row in measured if row.target.sides == sides]
    if not measured:
        return []
    title, ratio = TITLES[sides], f"{sides.baseline} / {sides.candidate}"
    return [
        f"## {title}Per token",
        markdown_table(
            ("case", *sides.names, ratio, "bar", "bar, share of the limit", "GB/s read: min – median – max"),
            [
                (
                    *_cells(row, _per_token),
                    ratio_cell(row.main, "per_token"),
                    *_bars(row, "per_token", "limit_share"),
                    _bandwidth(row),
                )
                for row in measured
            ],
        ),
        f"## {title}First token",
        markdown_table(
            ("case", *sides.names, ratio, "bar", "bar, share of the limit"),
            [
                (*_cells(row, _first_token), ratio_cell(row.main, "ttft"), *_bars(row, "ttft", "prompt_share"))
                for row in measured
            ],
        ),
        f"## {title}Memory and tokens",
        "Peak memory beyond the memory of the process before loading; in brackets, relative to weights plus KV cache.",
        markdown_table(
            ("case", *sides.names, "bar", f"tokens of {sides.baseline} and {sides.candidate}", "bar"),
            [
                (*_cells(row, _memory), *_bars(row, "memory"), tokens(row.main), *_bars(row, "tokens"))
                for row in measured
            ],
        ),
        f"## {title}Against llama.cpp",
        _peer_table(sides, measured),
    ]


def _peer_table(sides: Sides, measured: Sequence[Row]) -> str:
    """The table of the cases that include the peer."""
    with_peer = [(row, row.peer) for row in measured if row.peer]
    if not with_peer:
        return (
            "No case was compared with it: it was not installed, or it failed. `profiles/README.md` says how to have "
            "it measured."
        )
    both = f"{sides.peer} / {sides.candidate}"
    return markdown_table(
        ("case", f"per token, {both}", "bar", "first token", "bar", f"tokens of {sides.peer} and {sides.candidate}"),
        [
            (
                row.target.name,
                ratio_cell(peer, "per_token"),
                *_bars(row, "llama_cpp"),
                ratio_cell(peer, "ttft"),
                *_bars(row, "llama_cpp_ttft"),
                tokens(peer),
            )
            for row, peer in with_peer
        ],
    )


def summary(row: Row) -> str:
    """One case in one line."""
    ratios = ", ".join(
        f"{ratio_cell(comparison, 'per_token')} against {comparison.baseline.name}" for comparison in row.comparisons
    )
    met = sum(check.met for check in row.checks.values())
    return f"{_per_token(row.main.candidate)} per token, {ratios}; {met} of {len(row.checks)} bars met"


def _cells(row: Row, cell: Callable[[Measurement], str]) -> list[str]:
    """The name of the case, and one cell for each side."""
    return [row.target.name, *(cell(row.sides[name]) if name in row.sides else NONE for name in row.target.sides.names)]


def _bars(row: Row, *names: str) -> list[str]:
    checks = [row.checks.get(name) for name in names]
    return [NONE if check is None else str(check) if check.met else f"**{check}**" for check in checks]


def _per_token(side: Measurement) -> str:
    return f"{_milliseconds(side.per_token_ms)} ({number_or_unknown(side.floor_share, '.0%')})"


def _first_token(side: Measurement) -> str:
    return f"{_milliseconds(side.ttft_ms)} ({number_or_unknown(side.prompt_share, '.0%')})"


def _milliseconds(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms" if value >= 10 else f"{value:.2f} ms"


def _memory(side: Measurement) -> str:
    share = memory_share(side)
    return NONE if share is None else f"{side.peak_rss_mb:,.0f} MB ({share:.2f}x)"


def _bandwidth(row: Row) -> str:
    probes = [probe for side in row.sides.values() for run in side.runs for probe in run.probes_gb_s]
    return f"{min(probes):.0f} – {np.median(probes):.0f} – {max(probes):.0f}" if probes else "unknown"


def _remarks(row: Row) -> Iterable[str]:
    return dict.fromkeys(remark for comparison in row.comparisons for remark in comparison.remarks)


def _environment(records: Sequence[Comparison]) -> str:
    environments = [record.candidate.environment for record in records]
    environment, loads = environments[0], [recorded.load_average for recorded in environments]
    measured = [record.candidate.created for record in records]
    sides = {side.name: side.impl for record in records for side in (record.baseline, record.candidate)}
    lines = {
        "measured": f"{min(measured):%Y-%m-%d %H:%M} to {max(measured):%Y-%m-%d %H:%M} UTC",
        "weights": "; ".join(sorted({record.case.origin for record in records})),
        **sides,
        "processor": f"{environment.cpu} ({' '.join(environment.cpu_flags)})",
        "system": environment.system,
        "governor": environment.governor or "unknown",
        "transparent huge pages": environment.transparent_huge_pages or "unknown",
        "load average before the first round": f"{min(loads)} to {max(loads)}",
        "software": f"Python {environment.python}, {environment.versions}",
        "compiler of the kernels": environment.compiler or "none",
        "commit": ", ".join(sorted({recorded.commit or "unknown" for recorded in environments})),
    }
    return "\n".join(f"- {name}: {text}" for name, text in lines.items())
