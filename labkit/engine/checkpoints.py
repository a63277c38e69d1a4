"""Options of `init_inference` for labkit's own checkpoints: loading them as they are, and saving them."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig

from labkit.engine.options import Options
from labkit.system.collective import Gather
from labkit.system.errors import UserError
from labkit.system.home import expanded
from labkit.weights.build import has_codes, saved_in
from labkit.weights.checkpoint.save import Saving
from labkit.weights.protocol import TensorSource
from labkit.weights.quantise import Quantization
from labkit.weights.spec import WeightSpec


def as_saved(options: Options, source: TensorSource) -> Options:
    """Returns options with the type and the quantisation of the saved weights, unless another type is requested.

    Raises ValueError for another quantisation: int8 weights are never quantised again.
    """
    if has_codes(source):
        kept = options.quant.model_copy(update={"as_stored": True})
        return options if options.dtype else options.model_copy(update={"dtype": torch.int8, "quant": kept})
    saved = saved_in(source)
    if saved is None or options.dtype not in (None, saved.dtype):
        return options
    if saved.dtype != torch.int8:
        return options.model_copy(update={"dtype": saved.dtype})
    assert saved.manifest.quant is not None
    quant, requested = saved.manifest.quant, options.quant
    weights = requested.model_copy(update={"activation": quant.activation})
    if weights not in (Quantization(), quant):
        got, expected = (settings.model_dump_json(exclude_defaults=True) for settings in (weights, quant))
        raise UserError(f"{saved.folder} was saved with quant={expected}, got {got}; leave quant out")
    kept = quant.model_copy(update={"activation": requested.activation})
    return options.model_copy(update={"dtype": saved.dtype, "quant": kept})


def begin_saving(options: Options, spec: WeightSpec, hf_config: PretrainedConfig, gather: Gather) -> Saving | None:
    """Begins the save that `save_mp_checkpoint_path` requests; None: it requests none."""
    if options.save_mp_checkpoint_path is None:
        return None
    return Saving.begin(expanded(options.save_mp_checkpoint_path), spec, hf_config, gather)
