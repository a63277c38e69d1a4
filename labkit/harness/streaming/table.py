"""Tables of a streaming plan: each batch, predicted and measured, and the best use of memory."""

from __future__ import annotations

from labkit.harness.streaming.plan import StreamingPlan
from labkit.harness.streaming.records import BatchPoint
from labkit.system.result_table import Claim, ResultTable
from labkit.system.rounding import ceil_div

TURNS = "whose turns of some steps are judged by probes just before and after them; intervals over epochs, 95%"
MOST_TRADES = 12  # rows of the table about memory


def predicted_table(plan: StreamingPlan) -> ResultTable:
    """A row for each batch that fits: the least time of a step, and so the most tokens per second."""
    return ResultTable(
        title=f"{plan.case.title}; predicted",
        columns=("sequences", "layers in memory", "MB a step", "disk, ms", "computing, ms", "at most tokens/s"),
        rows=tuple(
            (
                f"{step.batch:,}",
                f"{step.resident_layers} of {plan.footprint.layers}",
                f"{step.streamed_bytes / 1e6:,.0f}",
                three_digits(step.disk_ms),
                three_digits(step.compute_ms),
                three_digits(step.tokens_per_s),
            )
            for step in map(plan.step, plan.batches)
        ),
        claim=Claim(
            f"The largest batch that fits is {plan.largest_batch:,}.",
            "bold",
            f"{free_sentence(plan)} If all weights are streamed, it does from r* = F s / (2 D) = {plan.free_rows:,.0f} "
            "rows on.",
        ),
        notes=_notes(plan),
    )


def measured_table(plan: StreamingPlan) -> ResultTable:
    """A row for each measured batch."""
    best = plan.best_point
    assert best is not None
    return ResultTable(
        title=f"{plan.case.title}; measured",
        columns=(
            *("sequences", "layers in memory", "first token, ms", "a step, ms"),
            *("tokens/s", "of the most", "D", "GB"),
        ),
        rows=tuple(_measured(plan, point) for point in plan.points),
        claim=Claim(f"Measured: the most tokens/s at batch {best.batch:,}", "bold", _against_largest(plan, best)),
        notes=(
            "of the most: share of the tokens/s that the probed rates allow; D: the disk's rate, GB/s; "
            f"GB: peak memory, of {plan.case.memory_gb:g}",
            *([f"{epochs} epochs, each with a new engine, {TURNS}"] if (epochs := len(best.epochs)) else []),
            *([f"note: {plan.trust.sentence}"] if not plan.trust.trustworthy else []),
        ),
    )


def trade_table(plan: StreamingPlan) -> ResultTable:
    """A row for each possible number of resident layers: the quickest step, and the largest batch."""
    quickest, most = plan.lowest_latency.resident_layers, plan.highest_throughput.resident_layers
    marks = {quickest: "quickest step"}
    marks[most] = "quickest step, most tokens/s" if quickest == most else "most tokens/s"
    steps = plan.trade
    interval = ceil_div(len(steps), MOST_TRADES)
    shown = [step for index, step in enumerate(steps) if index % interval == 0 or step.resident_layers in marks]
    return ResultTable(
        title="Memory for layers, or for sequences; predicted",
        columns=("layers in memory", "one sequence, ms", "largest batch", "at most tokens/s", ""),
        rows=tuple(
            (
                f"{step.resident_layers} of {plan.footprint.layers}",
                three_digits(plan.step(1, step.resident_layers).step_ms),
                f"{step.batch:,}",
                three_digits(step.tokens_per_s),
                marks.get(step.resident_layers, ""),
            )
            for step in shown
        ),
        notes=(f"most tokens/s with {plan.highest_throughput.batch:,} sequences",),
    )


def free_sentence(plan: StreamingPlan) -> str:
    """The predicted number of sequences from which on streaming costs nothing, as a sentence."""
    if plan.free_batch is None:
        return "With one sequence the whole model fits into memory, so nothing is streamed."
    reached = "which fits" if plan.free_batch <= plan.largest_batch else "which does not fit"
    return f"Computing takes as long as the disk from {plan.free_batch:,} sequences on, {reached}."


def three_digits(value: float) -> str:
    """The value with three significant digits, never with an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _measured(plan: StreamingPlan, point: BatchPoint) -> tuple[str, ...]:
    return (
        f"{point.batch:,}",
        f"{point.resident_layers} of {plan.footprint.layers}",
        three_digits(point.ttft_ms),
        _step(point),
        three_digits(point.tokens_per_s),
        f"{plan.share_of_most(point):.0%}",
        f"{point.disk:.2f}",
        f"{point.peak_bytes / 1e9:.3f}",
    )


def _step(point: BatchPoint) -> str:
    """The time of a step, with its interval where there is one."""
    if len(point.epochs or point.runs_ms) < 2:
        return three_digits(point.step_ms)
    low, high = (three_digits(point.step_ms * end) for end in (point.interval.low, point.interval.high))
    return f"{three_digits(point.step_ms)} [{low}, {high}]"


def _against_largest(plan: StreamingPlan, best: BatchPoint) -> str:
    last = plan.points[-1]
    if best is not last:
        return f"{three_digits(best.tokens_per_s)}, and batch {last.batch:,} gave {three_digits(last.tokens_per_s)}"
    largest = "the largest that fits" if best.batch == plan.largest_batch else "the largest measured batch"
    return f"{three_digits(best.tokens_per_s)}; that is {largest}"


def _notes(plan: StreamingPlan) -> tuple[str, ...]:
    rates, case = plan.rates, plan.case
    memory = "" if rates.memory_gb_s is None else f"; memory {rates.memory_gb_s:.3g} GB/s"
    return (
        f"disk D = {rates.disk_gb_s:.4g} GB/s; processor F = {rates.gflop_s:,.4g} GFLOP/s{memory}; a weight takes "
        f"s = {plan.work.bytes_per_weight:.4g} bytes",
        f"weights {plan.footprint.weights / 1e9:.3g} GB, {case.slots} slots of {plan.footprint.layer / 1e6:.3g} MB; "
        f"keys and values of a sequence {plan.footprint.kv_per_token * case.tokens / 1e6:.3g} MB",
        f"weights: {case.origin}",
        f"machine: {plan.environment.machine}",
    )
