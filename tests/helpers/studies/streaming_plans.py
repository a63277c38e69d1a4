"""Plans of streaming with known figures, small models that need streaming, and measurements of plans."""

from pathlib import Path
from typing import Any

from helpers.models.small_models import small_model
from helpers.studies.comparisons import environment

from labkit.engine.offload.footprint import OTHERS, Footprint
from labkit.harness.streaming.make import plan_streaming
from labkit.harness.streaming.plan import StreamingPlan, StreamRates, StreamWork
from labkit.harness.streaming.records import BatchPoint, LayerSpan, StreamCase

LAYERS, LAYER, OUTSIDE, KV = 20, 100_000_000, 200_000_000, 100_000
NUMBERS = LAYER // 2  # of numbers in a layer's matrices in bfloat16
DISK, PEAK = 1.0, 400.0  # GB/s, GFLOP/s


def plan(*, memory_gb: float = 1.5, points: tuple[BatchPoint, ...] = (), **rates: Any) -> StreamingPlan:
    """Plan for 2.2 GB of weights in bfloat16, of which no more than half fits."""
    return StreamingPlan(
        case=StreamCase(model="gpt2", origin="random weights, seed 0", precision="bfloat16", memory_gb=memory_gb,
                        prompt_tokens=16, new_tokens=8, slots=3, threads=2),
        environment=environment(),
        footprint=Footprint(outside=OUTSIDE, layer=LAYER, layers=LAYERS, kv_per_token=KV, row=100_000, kept_row=4_000,
                            logits_row=200_000),
        work=StreamWork(bytes_per_weight=2.0, weight_bytes=LAYERS * LAYER + OUTSIDE, flops=2.0 * NUMBERS * LAYERS,
                      prompt_flops=32.0 * NUMBERS * LAYERS),
        rates=StreamRates(**({"disk_gb_s": DISK, "gflop_s": PEAK} | rates)),
        points=points,
    )  # fmt: skip


def point(batch: int, step_ms: float = 1500.0, *, resident: int = 5, disk: float = DISK, **more: Any) -> BatchPoint:
    """A batch with steps that scatter a little."""
    return BatchPoint(
        **{
            "batch": batch, "resident_layers": resident, "streamed_bytes": (LAYERS - resident) * LAYER,
            "ttft_ms": 2 * step_ms, "decode_ms": (step_ms * 0.99, step_ms, step_ms * 1.02), "disk_gb_s": (disk, disk),
            "gflop_s": (PEAK, PEAK), "peak_bytes": 1_200_000_000, "spans": spans(),
            "runs_ms": tuple(step_ms * off for off in (0.99, 1.0, 1.0, 1.0, 1.0, 1.02)), "others_cores": 0.0,
        } | more
    )  # fmt: skip


def spans(layers: int = 4, slots: int = 2, steps: int = 3, read_ms: float = 10.0) -> tuple[LayerSpan, ...]:
    """Spans of layers that are all streamed: reading never pauses, and after it each layer is computed in 4 ms."""
    recorded = []
    for turn in range(layers * steps + slots):
        layer, step, slot = turn % layers, turn // layers, turn % slots
        begin_ms = (turn - slots) * read_ms
        ready_ms = max(0.0, begin_ms + read_ms)
        if turn >= slots:
            recorded.append(
                LayerSpan(kind="read", layer=layer, slot=slot, step=step, begin_ms=begin_ms, end_ms=ready_ms)
            )
        if step == steps:
            continue
        recorded += [
            LayerSpan(kind="wait", layer=layer, slot=slot, step=step, begin_ms=max(0.0, ready_ms - 6), end_ms=ready_ms),
            LayerSpan(kind="compute", layer=layer, slot=slot, step=step, begin_ms=ready_ms, end_ms=ready_ms + 4),
        ]
    return tuple(recorded)


def saved_model(folder: Path, layers: int = 8) -> Path:
    """Checkpoint of a small LLaMA that has more layers than there are slots."""
    small_model("llama", num_hidden_layers=layers, vocab_size=300).save_pretrained(folder)
    return folder


def tight_gb(model: Path, extra_layers: float = 0.0, **options: Any) -> float:
    """GB that hold the slots, one sequence, and `extra_layers` more layers."""
    roomy = plan_streaming(str(model), memory_gb=1.0, disk_gb_s=DISK, gflop_s=PEAK, **options)
    layers = roomy.case.slots + extra_layers
    other_bytes = roomy.footprint.beside_weights(1, roomy.case.prompt_tokens, roomy.case.tokens)
    assert other_bytes > OTHERS
    return (roomy.footprint.outside + layers * roomy.footprint.layer + other_bytes) / 1e9
