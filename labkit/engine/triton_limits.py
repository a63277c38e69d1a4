"""Which models the Triton kernels cannot run."""

from __future__ import annotations

from labkit.kernels.triton_limits import KNOWN_ACTIVATIONS, unknown_to_triton
from labkit.models.config import ModelConfig


def missing_in_triton(config: ModelConfig) -> str | None:
    """What the Triton kernels lack for a model; None: nothing."""
    if config.qk_norm_whole:
        return "norms over all heads together are not in the Triton kernels yet"
    if config.activation not in KNOWN_ACTIVATIONS:
        return f"the activation {config.activation} is not in the Triton kernels yet"
    if config.experts is not None and (unknown := unknown_to_triton(config.experts)):
        return f"experts with {unknown} are not in the Triton kernels yet"
    return None
