"""The exercise of the notebook on experts: what a step of a batch that was not measured reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from IPython.display import Markdown

from labkit.notebooks.verdicts import checked
from labkit.system.markdown import markdown_table

if TYPE_CHECKING:
    from labkit.studies.experts_study import ExpertsStudy

BATCH = 6


def experts_puzzle(study: ExpertsStudy) -> Markdown:
    """The table of facts from which the exercise starts."""
    rows = {
        "sequences": f"{BATCH}",
        "experts of a layer": f"{study.experts}",
        "experts of a token in each layer": f"{study.of_a_row}",
        "layers": f"{len(study.counts)}",
        "MB of an expert": f"{study.expert_bytes / 1e6:.4g}",
    }
    return Markdown(markdown_table(("", ""), rows.items()))


def check_reading(study: ExpertsStudy, experts_read: object, read_mb: object) -> Markdown:
    """The verdicts on two answers for BATCH sequences whose tokens choose evenly: the experts of a layer that a step
    reads on average, and the MB of experts in all layers.
    """
    count, chosen, layers = study.experts, study.of_a_row, len(study.counts)
    right, size = study.expected(BATCH), study.expert_bytes / 1e6
    mistakes = {
        float(min(BATCH * chosen, count)): "this counts an expert again for every token that chose it",
        float(chosen): "these are the experts of one token",
        float(count): "every expert would be read then; some may have no token",
        count - right: "these are the experts that are not read",
    }
    in_mb = {value * size * layers: remark for value, remark in mistakes.items()} | {
        right * size: "this is one layer",
        count * size * layers: "these are all experts of the model",
    }
    return Markdown(
        f"- experts of a layer: {checked(experts_read, right, mistakes)}\n"
        f"- MB of experts: {checked(read_mb, right * size * layers, in_mb)}"
    )
