"""The fused inference engine and the vanilla models that it is compared with."""

from labkit.engine.engine import InferenceEngine
from labkit.engine.init_inference import init_inference
from labkit.engine.runners.stage_clock import StageTime

__all__ = ["InferenceEngine", "StageTime", "init_inference"]
