"""The exercise of the notebook on pipelines: which order of work removes a bubble, and what a barrier costs.

An order is a text with a letter for each turn. It is checked by simulation: the stages take the micro-batches in that
order, each as early as possible. Any order is right whose bubble is only filling and draining.
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
MORE_STAGES = 2  # the question is about this many stages more than were measured
MOST_BUBBLE = 0.1


def pipeline_puzzle(study: PipelineStudy) -> Markdown:
    """The table of facts from which the exercise starts."""
    queue, rounds = _simulated("queue"), _simulated("rounds")
    tokens = ", ".join(f"{name} {count}" for name, count in TOKENS.items())
    rows = {
        "stages of the barrier's pipeline": f"{_stages(study)}, equal",
        "its allowed bubble": f"at most {MOST_BUBBLE:.0%}",
        "stages of the puzzle": f"{STAGES}, equal: each takes 1 for a step",
        "tokens of its micro-batches": tokens,
        "the puzzle with `rounds`": f"{_wall(rounds):g} stage times, bubble {simulated_bubble(rounds):.0%}",
        "the puzzle with `queue`": f"{_wall(queue):g} stage times, bubble {simulated_bubble(queue):.0%}",
    }
    return Markdown(markdown_table(("", ""), rows.items()))


def check_pipeline(study: PipelineStudy, micro_batches: object, order: object) -> Markdown:
    """The verdicts on two answers: the least number of micro-batches with which `barrier` has a bubble of at most
    MOST_BUBBLE on two stages more than in the study, and an order of work for the puzzle with the least bubble.
    """
    measured, stages = study.measured.case.stages, _stages(study)
    times = round(1 / MOST_BUBBLE)  # a run with the largest allowed bubble / its bubble
    right = next(m for m in range(1, 10_000) if bubble("barrier", stages, m, 1) <= MOST_BUBBLE + 1e-9)
    mistakes = {
        float(right + 1): "one fewer is enough: the bubble may be equal to the limit",
        float(right - 1): "with this number the bubble is still slightly above the limit",
        float(stages): "this number fills the stages once, but each token fills and drains them again",
        float((measured - 1) * (times - 1)): "this is for the stages that were measured",
        float((stages - 1) * times): "the time is m + P - 1 stage times, and m of them are work",
        float(stages * (times - 1)): "P - 1 of the P stages wait while the first micro-batch passes",
    }
    mistakes.pop(float(right), None)
    wrong = _problem(order)
    return Markdown(
        f"- micro-batches: {checked(micro_batches, right, mistakes)}\n- order: {wrong or _verdict(str(order))}"
    )


def drawn_order(study: PipelineStudy, order: object) -> go.Figure | Markdown:
    """The simulated run of an order, or of the queue while `order` is None."""
    del study  # the puzzle is the same for all studies
    if order is None:
        spans = _simulated("queue")
        return order_figure(spans, "The puzzle, in the order of the queue", _bubble_text(simulated_bubble(spans)))
    if wrong := _problem(order):
        return Markdown(f"Nothing to draw: {wrong}")
    spans = in_order(_places(str(order)), [1] * STAGES)
    return order_figure(spans, "Your order of work", _bubble_text(simulated_bubble(spans)))


def _simulated(schedule: str) -> tuple[StageSpan, ...]:
    """The simulated run of the puzzle with one of labkit's schedules."""
    return simulate(schedule, [1] * STAGES, list(TOKENS.values()), len(TOKENS))


def _stages(study: PipelineStudy) -> int:
    """The number of stages in the question about the barrier."""
    return study.measured.case.stages + MORE_STAGES


def _wall(spans: Sequence[StageSpan]) -> float:
    return max(span.end_ms for span in spans)


def _bubble_text(share: float) -> str:
    return f"simulated: bubble {share:.1%}; filling and draining alone {LEAST:.1%}"


def _problem(order: object) -> str:
    """The problem with an order of turns that cannot be run; empty for one that can."""
    if order is None:
        return "not answered yet"
    if not isinstance(order, str):
        return f"not yet: got {shown(order)}, expected a text such as 'ABCAB', with a letter for each turn"
    count = Counter(_letters(order))
    if unknown := [name for name in count if name not in TOKENS]:
        return f"not yet: got {shown(unknown[0])}, expected letters of {', '.join(TOKENS)}"
    if wrong := [name for name in TOKENS if count[name] != TOKENS[name]]:
        name = wrong[0]
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
        return f"**right**: bubble {share:.1%}, only filling and draining the stages"
    return (
        f"not yet: its bubble is {share:.1%}, and {LEAST:.1%} is possible; in which stretch do fewer than {STAGES} "
        "micro-batches have tokens left?"
    )
