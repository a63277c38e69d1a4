"""The check of notebook 01's predictions: how long a token takes in bfloat16."""

from __future__ import annotations

from typing import TYPE_CHECKING

from IPython.display import Markdown

from labkit.notebooks.verdicts import close, number_or_remark
from labkit.studies.frames import number
from labkit.system.markdown import as_text

if TYPE_CHECKING:
    from labkit.harness import Comparison

NEAR = 0.15  # largest error of a right prediction, as a fraction
DTYPE = "bfloat16"


def check_predicted(comparison: Comparison, baseline_ms: object, fused_ms: object) -> Markdown:
    """The verdicts on two predictions for a run in bfloat16: milliseconds per token of each side.

    A prediction is right within 15 %. The verdicts wait for a run in bfloat16.
    """
    if comparison.case.dtype != DTYPE:
        return Markdown(f"- predictions: this run is in {comparison.case.dtype}; set `{DTYPE}`, and run again")
    sides = ((comparison.baseline, baseline_ms), (comparison.candidate, fused_ms))
    return Markdown("\n".join(f"- {as_text(of.name)}: {_verdict(answer, of.per_token_ms)}" for of, answer in sides))


def _verdict(answer: object, measured_ms: float) -> str:
    predicted = number_or_remark(answer)
    if isinstance(predicted, str):
        return predicted
    words = f"you predicted {number(predicted)} ms, measured are {number(measured_ms)} ms"
    if close(predicted, measured_ms, NEAR):
        return f"**right**: {words}"
    return f"not yet: {words}; which bytes or which work did you leave out?"
