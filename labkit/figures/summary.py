"""The words and the table that go with the figures; every number in them comes from the record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import pandas as pd

from labkit.figures.frames import limit, names, number, sides, stage_frame
from labkit.figures.theme import in_lines
from labkit.studies.outcome import Outcome
from labkit.system.markdown import as_text, markdown_table

if TYPE_CHECKING:
    from labkit.harness import Comparison, Measurement

METRICS = {"ttft": "first token (TTFT)", "per_token": "per token", "end_to_end": "whole call"}


def case_line(comparison: Comparison) -> str:
    case = comparison.case
    return (
        f"{case.model} ({case.origin}), {case.dtype}, batch {case.batch}, "
        f"{case.prompt_tokens} prompt + {case.new_tokens} new tokens"
    )


def subtitle_of(comparison: Comparison) -> str:
    """The case of a figure, and a warning where its ratio is not trustworthy."""
    return in_lines(case_line(comparison), comparison.trust().short)


def stages_subtitle(comparison: Comparison) -> str:
    """`subtitle_of` for a figure of stages, with the source of their times."""
    taxes = [f"{side.name} {side.stage_tax:+.0%}" for side in sides(comparison).values() if side.stage_tax is not None]
    if not taxes:
        return subtitle_of(comparison)
    origin = f"stages are from one run, so without an interval; its steps against the timed ones: {', '.join(taxes)}"
    return in_lines(subtitle_of(comparison), origin)


def machine_line(comparison: Comparison) -> str:
    environment = comparison.candidate.environment
    versions = ", ".join(f"{name} {environment.packages[name]}" for name in ("torch", "transformers"))
    return f"{environment.machine}; {versions}; {len(comparison.candidate.runs)} interleaved rounds"


def speedup_line(comparison: Comparison) -> str:
    """The claim per token with its interval, baseline and verdict, or with a note that it is not trustworthy."""
    baseline, candidate = names(comparison).values()
    return f"{candidate} against {baseline}, per token: {comparison.claim()}"


def outcome(comparison: Comparison) -> Outcome:
    """The result, with the share of the physical limit that each side reaches, its grade and the machine."""
    shares = ", ".join(f"{name} {_percent(side.floor_share)}" for name, side in _named(comparison))
    claim = f"{speedup_line(comparison)}; of the memory limit: {shares}"
    return Outcome.graded(claim, comparison.trust(), comparison.candidate.environment.machine)


def headline(comparison: Comparison) -> str:
    """The result in one line, and its grade."""
    return comparison.trust().explained(outcome(comparison).claim)


def summary_table(comparison: Comparison) -> pd.DataFrame:
    """The results: one row per quantity, a column per side, and the ratio with its interval and verdict."""
    both = sides(comparison).values()
    rows = {
        f"{label}, ms": [number(getattr(side, f"{metric}_ms"), 4) for side in both] + _ratio(comparison, metric)
        for metric, label in METRICS.items()
    }
    rows["tokens per second"] = [number(side.tokens_per_s, 4) for side in both] + ["", ""]
    rows["share of the limit"] = [_percent(side.floor_share) for side in both] + ["", ""]
    rows["peak memory for the model, MB"] = [_megabytes(side.peak_rss_mb) for side in both] + ["", ""]
    columns = [*names(comparison).values(), f"ratio [{comparison.confidence} interval]", "verdict"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns)


def answers(comparison: Comparison) -> str:
    """Markdown with the question to both sides, and their answers."""
    return answers_table(comparison.candidate.question, {name: side.answer for name, side in _named(comparison)})


def answers_table(question: str, by_side: Mapping[str, str | None]) -> str:
    """Markdown with a question and the answer of each side; None: the model holds no conversations."""
    if all(answer is None for answer in by_side.values()):
        return "Nothing was asked: the model's tokenizer has no chat template, so it holds no conversations."
    rows = [(name, _cell(answer or "")) for name, answer in by_side.items()]
    return f"**{_cell(question)}**\n\n{markdown_table(('side', 'answer'), rows)}"


def notes(comparison: Comparison) -> str:
    """Markdown with this record's figures on the points that the notebook asks a reader to notice."""
    lines = [
        f"**{speedup_line(comparison)}.** {_noise_sentence(comparison)}",
        _limit_sentence(comparison),
        _stage_sentence(comparison),
        "The two sides produced the same tokens."
        if comparison.tokens_equal
        else f"The two sides' tokens differ from new token {comparison.first_difference} on.",
    ]
    trust = ["", "Before you trust it:", "", *(f"- {remark}" for remark in comparison.remarks)]
    return "\n".join([f"- {line}" for line in lines if line] + (trust if comparison.remarks else []))


def _noise_sentence(comparison: Comparison) -> str:
    noise = comparison.ratio("per_token").noise
    if comparison.looks:
        return (
            f"Rounds were added until there was a verdict or the time was spent; the interval holds with "
            f"{comparison.confidence}, and a claim needs more than {noise:.0%}."
        )
    return f"A side against itself differed by up to {noise:.1%} during this run."


def _limit_sentence(comparison: Comparison) -> str:
    memory_limit = limit(comparison)
    if memory_limit is None:
        return "No bandwidth was probed, so how far both sides are from the limit is unknown."
    shares = " and ".join(f"{name} {_percent(side.floor_share)}" for name, side in _named(comparison))
    return (
        f"A decode step has to read {number(memory_limit.megabytes)} MB. At the "
        f"{memory_limit.bandwidth_gb_s:.1f} GB/s that memory gave between the runs this takes "
        f"{number(memory_limit.floor_ms)} ms; of this limit, {shares} are reached."
    )


def _stage_sentence(comparison: Comparison) -> str:
    frame = stage_frame(comparison)
    if not frame.any().all():
        return ""
    saved = (frame["baseline"] - frame["candidate"]).sort_values(ascending=False)
    top = frame.loc[saved.index[0]]
    slow, fast = number(top["baseline"]), number(top["candidate"])
    return (
        f"The stage that saves most is {saved.index[0]}: {slow} ms become {fast} ms per token. "
        f"The longest stage of {names(comparison)['candidate']}'s step is {frame['candidate'].idxmax()}."
    )


def _named(comparison: Comparison) -> Iterator[tuple[str, Measurement]]:
    return zip(names(comparison).values(), sides(comparison).values(), strict=True)


def _ratio(comparison: Comparison, metric: str) -> list[str]:
    trusted = comparison.trust(metric).trustworthy
    return [str(comparison.ratio(metric)), str(comparison.verdict_of(metric)) if trusted else "not trustworthy"]


def _cell(text: str) -> str:
    """A model's text as a cell of a Markdown table, line by line."""
    return "<br>".join(map(as_text, text.split("\n")))


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.0%}"


def _megabytes(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.0f}"
