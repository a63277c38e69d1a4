"""The streamed engine against other ways to run a model that is larger than memory, and published figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import plotly.graph_objects as go

from labkit.figures.published_panels import LABEL, add_measured, add_published, source_lines
from labkit.figures.room import folded, left_of
from labkit.figures.streaming import subtitle
from labkit.figures.theme import finish, in_lines, panels
from labkit.published import published
from labkit.studies.frames import number

if TYPE_CHECKING:
    import pandas as pd

    from labkit.studies.larger_than_memory import StreamingStudy

TABLES = ("zero-inference-v100", "zero-inference-a6000")
PER_TOKEN = "per_token"


def offload_figure(study: StreamingStudy) -> go.Figure:
    """Speedups of the streamed engine, and below them published throughputs.

    The speedups are over each baseline in the same memory, with intervals. The articles report tokens per second for
    one GPU, with weights in CPU memory or on NVMe.
    """
    theirs = _published()
    labels = [_label(row) for _, row in theirs.iterrows()]
    names = [f"against {comparison.baseline.name}" for comparison in study.comparisons]
    heights = [30 + 60 * len(names)] * bool(names) + [20 + 50 * len(labels)]
    left, rows = left_of([*names, *labels]), len(heights)
    figure = panels(heights, 70)
    if names:
        ratios = [comparison.ratio(PER_TOKEN) for comparison in study.comparisons]
        texts = [
            f"{comparison.claim().replace('] ', ']<br>')}<br>"
            f"{number(comparison.baseline.per_token_ms)} to {number(comparison.candidate.per_token_ms)} ms"
            for comparison in study.comparisons
        ]
        compared = "times faster per token, in the same memory"
        add_measured(figure, dict(zip(names, ratios, strict=True)), texts, left, compared)
    texts = [f"<b>{number(row['value'])}</b>, batch {row['batch']}" for _, row in theirs.iterrows()]
    add_published(figure, labels, theirs["value"], theirs["source"], texts, left, row=rows, unit=" tokens/s")
    ticks = [10.0**power for power in range(-3, 4)]
    figure.update_xaxes(title="tokens per second, one GPU", tickvals=ticks, ticktext=[f"{tick:g}" for tick in ticks],
                        row=rows, col=1)  # fmt: skip
    title = "Against other ways to run a model that is larger than memory"
    text = in_lines(subtitle(study), *_compared(study), *source_lines(theirs["source"]))
    return finish(figure, title, text, sum(heights) + 120 + 70 * (rows - 1), left=left)


def _compared(study: StreamingStudy) -> list[str]:
    """The case that was compared, and a warning where the comparison is not trustworthy."""
    if not study.comparisons:
        return ["no baseline was measured; the notes say why"]
    case, rounds = study.comparisons[0].case, study.comparisons[0].rounds
    doubts = [short for comparison in study.comparisons if (short := comparison.trust().short)]
    conditions = f"compared at batch {case.batch}, {case.prompt_tokens} + {case.new_tokens} tokens, {rounds} rounds"
    return [conditions, *dict.fromkeys(doubts)]


def _published() -> pd.DataFrame:
    """The articles' figures for one GPU."""
    import pandas as pd

    frame = pd.concat([published(table) for table in TABLES])
    return frame[frame["gpus"] == 1]


def _label(row: pd.Series) -> str:
    method = f"{row['method'].removeprefix('zero-inference ')}, {row['precision']}"
    return in_lines(folded(f"{row['model']}, {row['hardware']}", LABEL), folded(method, LABEL))
