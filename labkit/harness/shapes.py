"""Shapes of a model's config, from which the ops count bytes and FLOPs."""

from __future__ import annotations

from labkit.kernels.shapes import LayerShape, ModelShape
from labkit.kernels.types import Heads
from labkit.models.config import ModelConfig


def layer_shape(config: ModelConfig) -> LayerShape:
    """Shape of a layer of the model, under the name of its architecture."""
    return LayerShape(
        model=config.architecture,
        hidden=config.hidden_size,
        heads=Heads(config.num_heads, config.num_kv_heads, config.head_dim),
        intermediate=config.intermediate_size,
        vocabulary=config.vocab_size,
        norm=config.norm,
        activation=config.activation,
        gated=config.gated,
        rotary=config.rotary.dim if config.rotary else 0,
        interleaved=config.rotary is not None and config.rotary.interleaved,
        alibi=config.position == "alibi",
        biases=config.biases,
        parallel=config.parallel_residual,
        shared_norm=config.shared_norm,
        qk_norm=config.qk_norm,
        output_norms=config.output_norms,
    )


def model_shape(config: ModelConfig) -> ModelShape:
    """Shape of the whole model."""
    return ModelShape(
        layer=layer_shape(config),
        windows=config.windows,
        embedding=config.embedding_size,
        learned_positions=config.position == "learned",
        embedding_norm=config.embedding_norm,
        final_norm=config.final_norm,
    )
