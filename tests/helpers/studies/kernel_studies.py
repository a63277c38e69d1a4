"""A study of kernels with made-up times."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from helpers.studies.comparisons import environment

from labkit.harness.regions.records import LadderMeasurement, LayerCase, RegionMeasurement
from labkit.harness.regions.sides import FUSED, ONE_CALL, UNFUSED
from labkit.harness.regions.vocabulary import RUNGS
from labkit.stages import FUSED_REGIONS
from labkit.studies.kernels import KernelStudy, Span

CASE = LayerCase(impl="cpp", model="gpt2", dtype="float32", batch=1, context=128, threads=2, layers=12)
OPS = {  # unfused, of each region
    "qkv": ("native_layer_norm", "addmm"),
    "attention": ("split", "view", "transpose", "copy_", "scaled_dot_product_attention", "transpose", "reshape"),
    "mlp": ("native_layer_norm", "addmm", "gelu"),
    "residual": ("add",),
}
EPOCHS = (0, 0, 1, 1, 2, 2)
WOBBLE = (1.0, 1.01, 0.99, 1.0, 1.02, 0.98)


def study() -> KernelStudy:
    """Each fused region takes a third of the unfused one; each rung saves 9 µs."""
    rows = tuple(
        RegionMeasurement(
            region=region,
            ops=OPS[region],
            unfused_bytes=3 * 10**6,
            bytes=10**6,
            flops=2 * 10**6,
            rounds_us={UNFUSED: times(90), FUSED: times(30), ONE_CALL: times(30)},
            warm_us={UNFUSED: times(60), FUSED: times(20)},
            **shared(),
        )
        for region in FUSED_REGIONS
    )
    rungs = {rung: times(100 - 9 * number) for number, rung in enumerate((*RUNGS, ONE_CALL))}
    ladder = LadderMeasurement(bytes=4 * 10**6, rounds_us=rungs, **shared())
    return KernelStudy(rows, ladder, tuple(span for side in (UNFUSED, FUSED) for span in spans(side)), 800.0)


def shared() -> dict[str, Any]:
    """Fields of every record."""
    return {
        "created": datetime(2026, 1, 1, tzinfo=UTC),
        "case": CASE,
        "environment": environment(),
        "bandwidth_gb_s": (40.0,) * len(EPOCHS),
        "others_cores": (0.0,) * (EPOCHS[-1] + 1),
        "epochs": EPOCHS,
        "looks": (EPOCHS[-1] + 1,),
        "placed_anew": True,
    }


def times(us: float) -> tuple[float, ...]:
    return tuple(us * factor for factor in WOBBLE)


def spans(side: str) -> list[Span]:
    """One layer: a region after another, each with its ops if it is unfused."""
    made, start = [], 0.0
    for region in FUSED_REGIONS:
        took = 90.0 if side == UNFUSED else 30.0
        ops = OPS[region] if side == UNFUSED else ()
        made.append(Span(side, region, None, start, took))
        made += [Span(side, region, op, start + took * at / len(ops), took / len(ops)) for at, op in enumerate(ops)]
        start += took
    return made
