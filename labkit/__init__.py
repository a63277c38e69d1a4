"""A profiling lab and fused-kernel inference engine for transformers."""

from typing import TYPE_CHECKING

from labkit.system.lazy import lazy_parts

if TYPE_CHECKING:
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

# Torch and the engine are loaded on first use, so that `import labkit` and the trace tools stay light.
__all__, __getattr__, __dir__ = lazy_parts(__name__, _MODULES)
