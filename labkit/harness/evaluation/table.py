"""An evaluation as a table for the terminal."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from labkit.harness.evaluation.records import Evaluation, EvaluationCase
from labkit.statistics import Mean


def evaluation_table(found: Evaluation) -> RenderableType:
    """Perplexity of trained weights, divergence and agreement, with their intervals over windows."""
    case = found.case
    table = Table(title=f"{case.model}, {case.dtype}, against {case.against}", title_justify="left")
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
        f"{found.weight_bytes / 1e6:,.1f} MB of {found.weights} weights{_more(case)}; {case.origin}",
        f"machine: {found.environment.machine}",
        *(f"note: {remark}" for remark in found.remarks),
    ]
    return Group(table, Text("\n".join(notes), style="dim"))


def _more(case: EvaluationCase) -> str:
    """What else differs from the engine's own ways."""
    cache = f", {case.kv_dtype} KV cache" if case.kv_dtype else ""
    rounded = ", activations rounded to 8 bits" if case.quant.get("activation") else ""
    return cache + rounded + (f", {case.rows} tokens at a time" if case.rows else "")


def _cells(mean: Mean, form: str) -> tuple[str, str]:
    show: Callable[[float], str] = form.format
    return show(mean.value), "–" if mean.low is None or mean.high is None else f"[{show(mean.low)}, {show(mean.high)}]"
