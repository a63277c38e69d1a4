"""The words and the table that go with the figures; every number in them comes from the record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import pandas as pd

from labkit.figures.theme import in_lines
from labkit.studies import comparison_words
from labkit.studies.frames import names, number, share_words, sides
from labkit.studies.outcome import Notes
from labkit.system.markdown import as_text, markdown_table

if TYPE_CHECKING:
    from labkit.harness import Comparison


class HasNotes(Protocol):
    """A study with notes."""

    @property
    def notes(self) -> Notes: ...


METRICS = {"ttft": "first token (TTFT)", "per_token": "per token", "end_to_end": "whole call"}


def case_line(comparison: Comparison) -> str:
    """The compared case in words."""
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
    """The machine, the versions of the libraries, and the number of rounds."""
    environment = comparison.candidate.environment
    versions = ", ".join(f"{name} {environment.packages[name]}" for name in ("torch", "transformers"))
    return f"{environment.machine}; {versions}; {comparison.rounds} interleaved {comparison.unit}s"


def summary_table(comparison: Comparison) -> pd.DataFrame:
    """The results: one row per quantity, a column per side, and the ratio with its interval and verdict."""
    both = sides(comparison).values()
    rows = {
        f"{label}, ms": [number(getattr(side, f"{metric}_ms"), 4) for side in both] + _ratio(comparison, metric)
        for metric, label in METRICS.items()
    }
    rows["tokens per second"] = [number(side.tokens_per_s, 4) for side in both] + ["", ""]
    rows["share of the limit"] = [share_words(side.floor_share) for side in both] + ["", ""]
    rows["peak memory for the model, MB"] = [_megabytes(side.peak_rss_mb) for side in both] + ["", ""]
    columns = [*names(comparison).values(), f"ratio [{comparison.confidence} interval]", "verdict"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns)


def answers(comparison: Comparison) -> str:
    """Markdown with the question to both sides, and their answers."""
    replies = [side.answer for side in sides(comparison).values()]
    return answers_table(comparison.candidate.question, dict(zip(names(comparison).values(), replies, strict=True)))


def answers_table(question: str, by_side: Mapping[str, str | None]) -> str:
    """Markdown with a question and the answer of each side; None: the model holds no conversations."""
    if all(answer is None for answer in by_side.values()):
        return "Nothing was asked: the model's tokenizer has no chat template, so it holds no conversations."
    rows = [(name, _cell(answer or "")) for name, answer in by_side.items()]
    return f"**{_cell(question)}**\n\n{markdown_table(('side', 'answer'), rows)}"


def notes(comparison: Comparison) -> str:
    """Markdown with this record's figures on the points that the notebook asks a reader to notice."""
    return _as_list(comparison_words.notes(comparison))


def study_notes(study: HasNotes) -> str:
    """Markdown with a study's figures on the points that its notebook asks a reader to notice."""
    return _as_list(study.notes)


def _as_list(remarks: Notes) -> str:
    lines = [f"- {sentence}" for sentence in remarks.sentences]
    if remarks.doubts:
        lines += ["", "Before you trust these figures:", "", *(f"- {doubt}" for doubt in remarks.doubts)]
    return "\n".join(lines)


def _ratio(comparison: Comparison, metric: str) -> list[str]:
    trusted = comparison.trust(metric).trustworthy
    return [str(comparison.ratio(metric)), str(comparison.verdict_of(metric)) if trusted else "not trustworthy"]


def _cell(text: str) -> str:
    """A model's text as a cell of a Markdown table, line by line."""
    return "<br>".join(map(as_text, text.split("\n")))


def _megabytes(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.0f}"
