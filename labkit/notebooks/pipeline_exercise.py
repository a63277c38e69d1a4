"""The exercise of the notebook on pipelines: which order of work removes a bubble, and what a barrier costs.

An order is a text with a letter for each turn, so it can be checked by running it: stages take the micro-batches in
that order, each as early as it can. Whatever order leaves no more bubble than filling and draining is right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from IPython.display import Markdown

from labkit.figures.pipeline_ideal import order_figure
from labkit.harness.pipeline.formulas import bubble
from labkit.harness.pipeline.simulate import in_order, simulate, simulated_bubble
from labkit.notebooks.verdicts import checked, shown
from labkit.system.markdown import markdown_table

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from labkit.harness.pipeline.records import StageSpan
    from labkit.studies.pipeline import PipelineStudy

STAGES = 3
LONG, SHORT, SHORTS = 6, 2, 3  # tokens of the two long micro-batches and of the short ones
TOKENS = {"A": LONG, "B": LONG, **{chr(ord("C") + place): SHORT for place in range(SHORTS)}}
TURNS = sum(TOKENS.values())
LEAST = (STAGES - 1) / (TURNS + STAGES - 1)  # the bubble of filling and draining
MORE_STAGES = 2  # than were measured are asked about
MOST_BUBBLE = 0.1


def pipeline_puzzle(study: PipelineStudy) -> Markdown:
    """What the exercise starts from."""
    queue = simulate("queue", [1] * STAGES, list(TOKENS.values()), len(TOKENS))
    rounds = simulate("rounds", [1] * STAGES, list(TOKENS.values()), len(TOKENS))
    tokens = ", ".join(f"{name} {count}" for name, count in TOKENS.items())
    rows = {
        "stages of the barrier's pipeline": f"{_stages(study)}, equal",
        "bubble that it may have": f"at most {MOST_BUBBLE:.0%}",
        "stages of the puzzle": f"{STAGES}, equal: each takes 1 for a step",
        "tokens of its micro-batches": tokens,
        "what `rounds` makes of them": f"{_wall(rounds):g} stage times, bubble {simulated_bubble(rounds):.0%}",
        "what `queue` makes of them": f"{_wall(queue):g} stage times, bubble {simulated_bubble(queue):.0%}",
    }
    return Markdown(markdown_table(("", ""), rows.items()))


def check_pipeline(study: PipelineStudy, micro_batches: object, order: object) -> Markdown:
    """The verdicts on two answers: the least number of micro-batches with which `barrier` has a bubble of at most
    MOST_BUBBLE on the study's stages and two more, and an order of work for the puzzle with the least bubble there is.
    """
    stages = _stages(study)
    right = next(m for m in range(1, 10_000) if bubble("barrier", stages, m, 1) <= MOST_BUBBLE + 1e-9)
    mistakes = {
        float(right + 1): "one fewer is enough: at most means that it may be just as much",
        float(right - 1): "with so many the bubble is still a little larger",
        float(stages): "so many fill the stages once, but each token fills and drains them again",
        float(
            (study.measured.case.stages - 1) * round(1 / MOST_BUBBLE - 1)
        ): "this is for the stages that were measured",
        float((stages - 1) * round(1 / MOST_BUBBLE)): "the time is m + P - 1 stage times, of which m are work",
        float(stages * round(1 / MOST_BUBBLE - 1)): "of P stages P - 1 wait while the first micro-batch comes",
    }
    mistakes.pop(float(right), None)
    wrong = _problem(order)
    return Markdown(
        f"- micro-batches: {checked(micro_batches, right, mistakes)}\n- order: {wrong or _verdict(str(order))}"
    )


def drawn_order(study: PipelineStudy, order: object) -> go.Figure | Markdown:
    """The run of an order, or of the queue while there is none."""
    del study  # the puzzle is the same for all
    if order is None:
        spans = simulate("queue", [1] * STAGES, list(TOKENS.values()), len(TOKENS))
        return order_figure(spans, "The puzzle, as the queue does it", _told(simulated_bubble(spans)))
    if wrong := _problem(order):
        return Markdown(f"Nothing to draw: {wrong}")
    spans = in_order(_places(str(order)), [1] * STAGES)
    return order_figure(spans, "Your order of work", _told(simulated_bubble(spans)))


def _stages(study: PipelineStudy) -> int:
    return study.measured.case.stages + MORE_STAGES


def _wall(spans: Sequence[StageSpan]) -> float:
    return max(each.end_ms for each in spans)


def _told(share: float) -> str:
    return f"simulated: bubble {share:.1%}; filling and draining alone {LEAST:.1%}"


def _problem(order: object) -> str:
    """What is wrong with the order of turns itself; nothing where it can be run."""
    if order is None:
        return "not answered yet"
    if not isinstance(order, str):
        return f"not yet: got {shown(order)}, expected a text such as 'ABCAB', with a letter for each turn"
    count = Counter(_letters(order))
    if unknown := [name for name in count if name not in TOKENS]:
        return f"not yet: got {shown(unknown[0])}, expected letters of {', '.join(TOKENS)}"
    if off := [name for name in TOKENS if count[name] != TOKENS[name]]:
        name = off[0]
        return f"not yet: {name} has {count[name]} turns, expected {TOKENS[name]}: one for each of its tokens"
    return ""


def _letters(order: str) -> str:
    return "".join(order.upper().replace(",", " ").split())


def _places(order: str) -> list[int]:
    names = list(TOKENS)
    return [names.index(letter) for letter in _letters(order)]


def _verdict(order: str) -> str:
    share = simulated_bubble(in_order(_places(order), [1] * STAGES))
    if share <= LEAST + 1e-9:
        return f"**right**: bubble {share:.1%}, no more than filling and draining the stages takes"
    return (
        f"not yet: it runs with a bubble of {share:.1%}, and {LEAST:.1%} are possible; in which stretch do fewer than "
        f"{STAGES} micro-batches have tokens left?"
    )
