"""An evaluation as a table for the terminal."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from labkit.harness.evaluation.records import Evaluation
from labkit.statistics import Mean


def evaluation_table(found: Evaluation) -> RenderableType:
    """Perplexity of trained weights, divergence and agreement, with their intervals over windows."""
    case = found.case
    table = Table(title=f"{case.model}, {precision(found)}, against {case.against}", title_justify="left")
    for heading in ("", "value", "95 %"):
        table.add_column(heading, justify="right" if heading else "left")
    if found.trained:
        table.add_row("perplexity", *_cells(found.perplexity, "{:.4f}"))
        table.add_row(f"perplexity of {case.against}", *_cells(found.reference_perplexity, "{:.4f}"))
        table.add_row("change", *_cells(found.perplexity_change, "{:+.3%}"))
    table.add_row("KL divergence, nats a token", *_cells(found.kl, "{:.3g}"))
    table.add_row("same most likely token", *_cells(found.agreement, "{:.2%}"))
    notes = [
        f"{found.predicted:,} tokens predicted in {len(found.windows)} windows of {case.window}, of {case.text}",
        f"{found.tokens_per_s:,.0f} tokens a second, {found.impl} kernels",
        f"{found.weight_bytes / 1e6:,.1f} MB of {case.origin}",
        f"machine: {found.environment.machine}",
        *(f"note: {remark}" for remark in found.remarks),
    ]
    return Group(table, Text("\n".join(notes), style="dim"))


def precision(found: Evaluation) -> str:
    """How the weights are stored, in words."""
    weight = found.case.quant.get("weight", {})
    groups = f", {weight['q_groups']} groups a row" if weight.get("q_groups", 1) > 1 else ""
    return found.case.dtype + groups + (", LM head too" if found.case.quant.get("lm_head") else "")


def _cells(mean: Mean, form: str) -> tuple[str, str]:
    show: Callable[[float], str] = form.format
    return show(mean.value), "–" if mean.low is None or mean.high is None else f"[{show(mean.low)}, {show(mean.high)}]"
