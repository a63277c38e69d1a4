"""A profiling lab and fused-kernel inference engine for transformers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labkit.engine import InferenceEngine, init_inference
    from labkit.harness import measure_latency
    from labkit.harness.compare.versus import compare
    from labkit.launcher.rank_process import RankError
    from labkit.launcher.spawn import launch
    from labkit.weights.resolve import resolve

__version__ = "0.1.0"
__all__ = ["InferenceEngine", "RankError", "compare", "init_inference", "launch", "measure_latency", "resolve"]

_HOME = {
    "InferenceEngine": "labkit.engine",
    "init_inference": "labkit.engine",
    "RankError": "labkit.launcher.rank_process",
    "compare": "labkit.harness.compare.versus",
    "launch": "labkit.launcher.spawn",
    "measure_latency": "labkit.harness",
    "resolve": "labkit.weights.resolve",
}


def __getattr__(name: str) -> Any:
    """Loads torch and the engine on first use, so that `import labkit` and its tools for traces stay light."""
    if name not in _HOME:
        raise AttributeError(f"module 'labkit' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
