"""Loader of the engine's sides with resident weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from labkit.engine import init_inference
from labkit.engine.runners.stage_clock import StageTime
from labkit.harness.compare.loaded_side import LoadedSide, comparison_device
from labkit.harness.compare.loader import MemoryLoader
from labkit.harness.compare.sides import side_row
from labkit.harness.compare.stage_spans import SpanClock
from labkit.harness.stored_weights import StoredWeights, stored_by
from labkit.kernels import gpu
from labkit.kernels.build import load, unavailable
from labkit.system.errors import UserError
from labkit.weights.build import has_codes
from labkit.weights.precision import Precision, precision_of
from labkit.weights.source import ModelSource


class Fused(MemoryLoader):
    """The engine, in the dtype of the other sides or in a precision of its own."""

    def check_name(self, side: str) -> None:
        _precision(side)

    def check(self, side: str, *, dtype: str, batch: int) -> None:
        if torch.cuda.is_available() and (reason := gpu.unavailable()):
            raise UserError(f"the side {side!r} would not run on the GPU, where the others do: {reason}")

    def check_model(self, side: str, source: ModelSource) -> None:
        if side_row(side).models == "GGUF" and not has_codes(source):
            raise UserError(
                f"got {source.name} for {side!r}, expected a model whose file holds codes, as a GGUF file may"
            )

    def get_ready(self, side: str, dtype: torch.dtype) -> None:
        """Compiles and loads the C++ kernels, if they run on this machine."""
        if comparison_device().type == "cpu" and not unavailable():
            precision = _precision(side)
            load(str((precision and precision.dtype) or dtype).removeprefix("torch."))

    def load(self, side: str, source: ModelSource, dtype: torch.dtype, options: Mapping[str, Any]) -> LoadedSide:
        precision = _precision(side)
        own = {"dtype": dtype} if precision is None else precision.options
        engine = init_inference(source, replace_with_kernel_inject=True, **{**own, **options})

        spans = SpanClock(engine.pipeline) if engine.pipeline else None

        def stage_times(run: Callable[[], object]) -> list[StageTime]:
            engine.stage_times(reset=True)
            run()
            return engine.stage_times() + (spans.beside_layers() if spans else [])

        reason = unavailable() if engine.impl == "reference" else None
        weights = stored_by(engine)
        kernels = f"{engine.impl} kernels" + (f", {weights} weights" if isinstance(weights, StoredWeights) else "")
        impl = f"labkit, {kernels}" + (f" ({reason.partition(':')[0]})" if reason else "")
        stamps = spans.stamps_ns if spans else None
        return LoadedSide(side, impl, weights, engine, source.tokenizer, stage_times, stamps_ns=stamps)


def _precision(side: str) -> Precision | None:
    """The engine's own precision; None for the dtype of the other sides. UserError for an unknown one."""
    row = side_row(side)
    name = row.precision or (side.removeprefix(row.prefix) if row.prefix else "")
    return precision_of(name) if name else None
