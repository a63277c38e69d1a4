"""What the options of `init_inference` ask of checkpoints of labkit's own: to be loaded as they are, to be saved."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PretrainedConfig

from labkit.engine.options import Options
from labkit.models.config import ModelConfig
from labkit.models.shards import Shard
from labkit.system.errors import UserError
from labkit.weights.build import saved_in
from labkit.weights.checkpoint.save import Saved, Saving, gather_of
from labkit.weights.protocol import TensorSource
from labkit.weights.quantise import Quantization, WeightQuantization


def as_saved(options: Options, source: TensorSource) -> Options:
    """With the type and the quantisation that the weights were saved in, unless another type is asked for.

    Raises ValueError for another quantisation: int8 weights are never quantised again.
    """
    saved = saved_in(source)
    if saved is None or options.dtype not in (None, saved.dtype):
        return options
    if saved.dtype != torch.int8:
        return options.model_copy(update={"dtype": saved.dtype})
    manifest = saved.manifest
    quant = Quantization(weight=WeightQuantization(q_groups=manifest.groups), lm_head=manifest.lm_head)
    if options.quant not in (Quantization(), quant):
        raise UserError(
            f"{saved.folder} was saved with q_groups={manifest.groups} and lm_head={manifest.lm_head}, got "
            f"q_groups={options.quant.groups} and lm_head={options.quant.lm_head}; leave quant out"
        )
    return options.model_copy(update={"dtype": saved.dtype, "quant": quant})


def begin_saving(
    options: Options, hf_config: PretrainedConfig, config: ModelConfig, dtype: torch.dtype, impl: str, part: Shard
) -> Saving | None:
    """The save that `save_mp_checkpoint_path` asks for, if it does."""
    if options.save_mp_checkpoint_path is None:
        return None
    what = Saved(
        config=config,
        hf_config=hf_config,
        dtype=dtype,
        impl=impl,
        groups=options.quant.groups,
        lm_head=options.quant.lm_head,
    )
    gather = gather_of(part.size, options.tensor_parallel.tp_group)
    return Saving.begin(Path(options.save_mp_checkpoint_path), what, part, gather)
