"""The case of a measurement of regions, checked and completed once, at the public edge."""

from __future__ import annotations

from labkit.engine.team_size import team_size
from labkit.harness.regions.random_layers import layers_beyond_caches
from labkit.harness.regions.records import LayerCase
from labkit.kernels import gpu
from labkit.kernels.gpu import CPU
from labkit.models.config import ModelConfig
from labkit.models.dtypes import dtype_of
from labkit.models.policies import model_config_of
from labkit.system.bounds import check_numbers
from labkit.system.errors import UserError
from labkit.weights.resolve import resolve

IMPLS = ("cpp", "triton")


def layer_case(
    model: str = "gpt2",
    *,
    impl: str = "cpp",
    dtype: str = "float32",
    batch: int = 1,
    context: int = 128,
    threads: int | None = None,
    layers: int | None = None,
) -> LayerCase:
    """A decode step of `batch` sequences with `context` tokens in the cache of each, through layers of a model's shape.

    model: a preset or a checkpoint's folder. Only its shape counts; the weights are random.
    threads: None: the engine's own number (`team_size`).
    layers: None: more than the caches hold.

    ValueError: an unknown impl, dtype or model, impossible sizes, or impl "triton" without a GPU.
    """
    if impl not in IMPLS:
        raise UserError(f"unknown impl {impl!r}; expected one of {', '.join(IMPLS)}")
    weight_dtype = dtype_of(dtype)
    threads = team_size() if threads is None else threads
    check_numbers(batch=batch, context=context, threads=threads, layers=layers)
    config = shape_of(model)
    if config.max_positions is not None and context + 1 > config.max_positions:
        raise UserError(
            f"a context of {context} and a new token are more than {model}'s {config.max_positions} positions; "
            "use a shorter context"
        )
    if impl == "triton":
        gpu.require()
    if layers is None:
        layers = layers_beyond_caches(config, weight_dtype, gpu.default_device() if impl == "triton" else CPU)
    return LayerCase(impl=impl, model=model, dtype=dtype, batch=batch, context=context, threads=threads, layers=layers)


def shape_of(model: str) -> ModelConfig:
    """The shape of a preset, or of the checkpoint in a folder."""
    return model_config_of(resolve(model).hf_config)
