"""The fused layer under DeepSpeed's name, for scripts that check whether kernels were injected:

assert isinstance(engine.module.transformer.h[0], DeepSpeedTransformerInference)
"""

from labkit.engine.runners.layer import FusedLayer as DeepSpeedTransformerInference

__all__ = ["DeepSpeedTransformerInference"]
