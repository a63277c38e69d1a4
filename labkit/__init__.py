"""A profiling lab and fused-kernel inference engine for transformers."""

from __future__ import annotations

TYPE_CHECKING = False  # typing itself is not loaded: the command handles Ctrl-C only after this import
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from labkit.conversation import Conversation
    from labkit.engine import InferenceEngine, init_inference
    from labkit.harness import measure_latency
    from labkit.harness.compare.compare import compare
    from labkit.harness.evaluation.evaluate import evaluate
    from labkit.launcher.rank_process import RankError
    from labkit.launcher.spawn import launch
    from labkit.weights.resolve import resolve

__version__ = "0.1.0"
_MODULES = ("conversation", "figures", "harness", "notebooks", "nsys", "stages", "widgets")
_lazy: tuple[list[str], Callable[[str], Any], Callable[[], list[str]]] | None = None


# Torch and the engine are loaded on first use, so that `import labkit` and the trace tools stay light.
def __getattr__(name: str) -> Any:
    public, part, _ = _lazy_parts()
    return public if name == "__all__" else part(name)


def __dir__() -> list[str]:
    return _lazy_parts()[2]()


def _lazy_parts() -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    global _lazy
    if _lazy is None:
        from labkit.system.lazy import lazy_parts

        _lazy = lazy_parts(__name__, _MODULES)
    return _lazy
